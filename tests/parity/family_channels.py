"""Mixers whose every channel is a head, as transformers computes them or as they are defined."""

import math
from functools import partial

import torch
from torch import Tensor

from lab import peers
from lab.layers.family.hyena import Hyena
from lab.layers.family.mamba import Mamba1
from lab.layers.family.mingru import MinGRU
from lab.layers.family.rglru import RGLRU
from tests.parity.compare import Comparison, Shape, compare_with, config, modules


def compare_mamba(s: Shape) -> Comparison:
    rank = 1 + s.seed % 3
    options = {"state_size": 1 + s.seed % 8, "time_step_rank": rank, "expand": 1 + s.seed % 2}
    settings = config("mamba", s.d, conv_kernel=1 + s.seed % 4, **options)
    theirs = s.draw(modules("mamba").MambaMixer(settings, 0)).eval()
    values, gate = theirs.in_proj.weight.chunk(2)
    dt_down, keys = theirs.x_proj.weight.split([rank, 2 * settings.state_size])
    weights = {"v_proj.weight": values, "g_proj.weight": gate, "key_proj.weight": keys}
    weights |= {"dt_down.weight": dt_down, "conv.weight": theirs.conv1d.weight[:, 0]}
    same = {"conv.bias": "conv1d.bias", "dt_up.weight": "dt_proj.weight"}
    same |= {"dt_up.bias": "dt_proj.bias", "out_proj.weight": "out_proj.weight"}
    same |= {"A_log": "A_log", "D": "D"}
    weights |= {ours: theirs.get_parameter(name) for ours, name in same.items()}
    sizes = {"d_state": settings.state_size, "d_inner": values.shape[0], "dt_rank": rank}
    ours = Mamba1(s.d, conv_width=settings.conv_kernel, **sizes)
    return Comparison(ours, weights, theirs, theirs)


def compare_rglru(s: Shape) -> Comparison:
    """Theirs writes the token at position 0 as if nothing had been kept before it."""
    name, width = "transformers.models.recurrent_gemma", 1 + s.seed % 4
    settings = peers.load(f"{name}.configuration_recurrent_gemma").RecurrentGemmaConfig(
        hidden_size=s.d, lru_width=s.d, num_attention_heads=s.h, conv1d_width=width
    )
    block = peers.load(f"{name}.modeling_recurrent_gemma").RecurrentGemmaRecurrentBlock(settings, 0)
    theirs = s.draw(block)
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
    positions = torch.arange(1, s.t + 1).expand(s.b, s.t)

    gates._rnn_scan = partial(gates._rnn_scan, acc_dtype=s.dtype)  # else in fp32

    def run(x: Tensor) -> Tensor:
        return theirs(x, positions, None, use_cache=False)[0]

    return Comparison(RGLRU(s.d, s.h, conv_width=width), weights, theirs, run)


def compare_mingru(s: Shape) -> Comparison:
    ours = s.draw(MinGRU(s.d, d_inner=s.p))

    def run(x: Tensor) -> Tensor:
        z, v = ours.z_proj(x).sigmoid(), ours.v_proj(x)
        state, outputs = x.new_zeros(s.b, s.p), []
        for i in range(s.t):
            state = (1 - z[:, i]) * state + z[:, i] * v[:, i]
            outputs.append(state)
        return ours.out_proj(torch.stack(outputs, 1))

    return compare_with(ours, run)


def compare_hyena(s: Shape) -> Comparison:
    """Filters and sums as in § 3 and the authors' code, tap by tap, without a transform."""
    bands, length = 1 + s.seed % 3, 7 + s.seed
    ours = s.draw(
        Hyena(s.d, filter_len=length, filter_width=s.p, n_bands=bands, conv_width=1 + s.seed % 3)
    )

    def run(x: Tensor) -> Tensor:
        i = torch.arange(s.t, dtype=x.dtype)[:, None]
        waves = torch.linspace(1e-4, max(bands - 1, 1e-4), bands, dtype=x.dtype)
        angles, time = 2 * torch.pi * i / length * waves, i / (length - 1)
        z = torch.cat([time, angles.cos(), -angles.sin()], -1)
        for layer in ours.layers:
            z = (ours.frequency * layer(z)).sin()
        slowest, fastest = (math.log(0.01) / share for share in (1.5, 0.3))
        window = (-time * torch.linspace(slowest, fastest, s.d, dtype=x.dtype).abs()).exp()
        taps = ours.taps(z) * window
        q, k, v = ours.conv(ours.in_proj(x))[0].chunk(3, -1)
        u = k * v
        sums = ours.D * u
        for j in range(s.t):
            sums[:, j] += (taps[: j + 1].flip(0) * u[:, : j + 1]).sum(1)
        return ours.out(q * sums)

    return compare_with(ours, run)
