"""Mixers whose every channel is a head, against transformers' layers or their definition."""

import math

import pytest
import torch

from lab import peers
from lab.layers.family.hyena import Hyena
from lab.layers.family.mamba import Mamba1
from lab.layers.family.mingru import MinGRU
from lab.layers.family.rglru import RGLRU
from tests.normal import draw_normal
from tests.parity.compare import (
    SHAPES,
    assert_agree,
    config,
    draw_parameters,
    draw_shape,
    modules,
)

ROUNDINGS = 160
"""Theirs computes in fp32, token by token; 1e-5 of the largest."""


@pytest.mark.parametrize("seed", SHAPES)
def test_mamba_is_that_of_transformers(seed: int):
    b, h, t, p = draw_shape(seed)
    d, rank = h * p, 1 + seed % 3
    options = {"state_size": 1 + seed % 8, "time_step_rank": rank, "expand": 1 + seed % 2}
    settings = config("mamba", d, conv_kernel=1 + seed % 4, **options)
    theirs = draw_parameters(modules("mamba").MambaMixer(settings, 0), torch.float32).eval()
    values, gate = theirs.in_proj.weight.chunk(2)
    dt_down, keys = theirs.x_proj.weight.split([rank, 2 * settings.state_size])
    weights = {"v_proj.weight": values, "g_proj.weight": gate, "key_proj.weight": keys}
    weights |= {"dt_down.weight": dt_down, "conv.weight": theirs.conv1d.weight[:, 0]}
    same = {"conv.bias": "conv1d.bias", "dt_up.weight": "dt_proj.weight"}
    same |= {"dt_up.bias": "dt_proj.bias", "out_proj.weight": "out_proj.weight"}
    same |= {"A_log": "A_log", "D": "D"}
    weights |= {ours: theirs.get_parameter(name) for ours, name in same.items()}
    ours = Mamba1(
        d,
        d_state=settings.state_size,
        d_inner=values.shape[0],
        dt_rank=rank,
        conv_width=settings.conv_kernel,
    )
    x = draw_normal(b, t, d, dtype=torch.float32, seed=seed)
    assert_agree(ours, weights, theirs, theirs, x, ROUNDINGS)


@pytest.mark.parametrize("seed", SHAPES)
def test_rglru_is_the_recurrent_block_of_transformers(seed: int):
    b, h, t, p = draw_shape(seed)
    name = "transformers.models.recurrent_gemma"
    settings = peers.load(f"{name}.configuration_recurrent_gemma").RecurrentGemmaConfig(
        hidden_size=h * p, lru_width=h * p, num_attention_heads=h, conv1d_width=1 + seed % 4
    )
    block = peers.load(f"{name}.modeling_recurrent_gemma").RecurrentGemmaRecurrentBlock(settings, 0)
    theirs = draw_parameters(block, torch.float32)
    for part in (theirs.linear_x, theirs.linear_y, theirs.linear_out):
        part.bias = None
    gates = theirs.rg_lru
    weights = {
        "v_proj.weight": theirs.linear_x.weight,
        "g_proj.weight": theirs.linear_y.weight,
        "out_proj.weight": theirs.linear_out.weight,
        "conv.weight": theirs.conv_1d.weight[:, 0],
        "conv.bias": theirs.conv_1d.bias,
        "rate": gates.recurrent_param,
        "gate_weight": torch.stack([gates.input_gate_weight, gates.recurrent_gate_weight]),
        "gate_bias": torch.stack([gates.input_gate_bias, gates.recurrent_gate_bias]),
    }
    # Theirs writes the token at position 0 as if nothing had been kept before it.
    positions = torch.arange(1, t + 1).expand(b, t)

    def run(x: torch.Tensor) -> torch.Tensor:
        return theirs(x, positions, None, use_cache=False)[0]

    ours = RGLRU(h * p, h, conv_width=1 + seed % 4)
    x = draw_normal(b, t, h * p, dtype=torch.float32, seed=seed)
    assert_agree(ours, weights, theirs, run, x, ROUNDINGS)


@pytest.mark.parametrize("seed", SHAPES)
def test_mingru_is_its_definition(seed: int):
    b, h, t, p = draw_shape(seed)
    ours = draw_parameters(MinGRU(p, d_inner=h))

    def run(x: torch.Tensor) -> torch.Tensor:
        z, v = ours.z_proj(x).sigmoid(), ours.v_proj(x)
        state, outputs = x.new_zeros(b, h), []
        for i in range(t):
            state = (1 - z[:, i]) * state + z[:, i] * v[:, i]
            outputs.append(state)
        return ours.out_proj(torch.stack(outputs, 1))

    weights = dict(ours.named_parameters())
    assert_agree(ours, weights, ours, run, draw_normal(b, t, p, seed=seed), ROUNDINGS)


@pytest.mark.parametrize("seed", SHAPES)
def test_hyena_is_its_definition(seed: int):
    """Filters and sums as in § 3 and the authors' code, tap by tap, without a transform."""
    b, h, t, p = draw_shape(seed)
    t, bands, length = 3 * t, 1 + seed % 3, 7 + seed
    ours = Hyena(h, filter_len=length, filter_width=p, n_bands=bands, conv_width=1 + seed % 3)
    ours = draw_parameters(ours)

    def run(x: torch.Tensor) -> torch.Tensor:
        i = torch.arange(t, dtype=x.dtype)[:, None]
        angles = (
            2
            * torch.pi
            * i
            / length
            * torch.linspace(1e-4, max(bands - 1, 1e-4), bands, dtype=x.dtype)
        )
        time = i / (length - 1)
        z = torch.cat([time, angles.cos(), -angles.sin()], -1)
        for layer in ours.layers:
            z = (ours.frequency * layer(z)).sin()
        slowest, fastest = (math.log(0.01) / share for share in (1.5, 0.3))
        window = (-time * torch.linspace(slowest, fastest, h, dtype=x.dtype).abs()).exp()
        taps = ours.taps(z) * window
        q, k, v = ours.conv(ours.in_proj(x))[0].chunk(3, -1)
        u = k * v
        sums = ours.D * u
        for j in range(t):
            sums[:, j] += (taps[: j + 1].flip(0) * u[:, : j + 1]).sum(1)
        return ours.out(q * sums)

    weights = dict(ours.named_parameters())
    assert_agree(ours, weights, ours, run, draw_normal(b, t, h, seed=seed), ROUNDINGS)
