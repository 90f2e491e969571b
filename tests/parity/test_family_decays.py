"""Mixers that decay and write, against the layers of flash-linear-attention and transformers.

The former's call kernels that a CPU does not run; their steps are written out here, on their
weights, around its naive recurrences.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lab import peers
from lab.layers.family.based import Based
from lab.layers.family.gla import GatedLinearAttention
from lab.layers.family.hgrn2 import HGRN2
from lab.layers.family.log_linear import LogLinearAttention
from lab.layers.family.mamba3 import Mamba3
from lab.layers.family.mlstm import MLSTM
from lab.layers.family.retnet import Retention
from lab.layers.family.rwkv6 import RWKV6
from tests.normal import draw_normal
from tests.parity.compare import SHAPES as SEEDS
from tests.parity.compare import assert_agree, draw_parameters, draw_shape

ROUNDINGS = 256
"""Their recurrence is in fp32, token by token."""
SHAPES = [(0, 1, 1, 5, 4), (1, 2, 2, 16, 6), (2, 1, 4, 33, 8)]
"""(seed, batch, heads, tokens, width of a head)."""


def heads(z: Tensor, h: int) -> Tensor:
    return rearrange(z, "b t (h n) -> b t h n", h=h)


def name_weights(theirs: nn.Module, **same: str) -> dict[str, Tensor]:
    """Return their parameters by our names."""
    same = {"q_proj": "q_proj", "out_proj": "o_proj"} | same
    return {
        ours if "norm" in ours or "bias" in ours else f"{ours}.weight": theirs.get_parameter(
            f"{name}.weight"
        )
        for ours, name in same.items()
    }


def gate_heads(theirs, o: Tensor, x: Tensor, norm) -> Tensor:
    o = F.rms_norm(o, o.shape[-1:], norm.weight, norm.eps)
    return theirs.o_proj(rearrange(o, "b t h p -> b t (h p)") * F.silu(theirs.g_proj(x)))


def compare_gla(h: int, p: int) -> tuple[nn.Module, nn.Module, dict[str, Tensor], Callable]:
    layer = peers.load("fla.layers.gla").GatedLinearAttention
    naive = peers.load("fla.ops.gla.naive").naive_recurrent_gla
    theirs = draw_parameters(layer(hidden_size=h * p, num_heads=h, expand_k=1.0), torch.float32)
    weights = name_weights(
        theirs,
        k_proj="k_proj",
        v_proj="v_proj",
        g_proj="g_proj",
        decay_down="gk_proj.0",
        decay_up="gk_proj.1",
        norm_weight="g_norm_swish_gate",
    )
    weights["decay_up.bias"] = theirs.get_parameter("gk_proj.1.bias")

    def run(x: Tensor) -> Tensor:
        q, k, v, g = (
            heads(f(x), h) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.gk_proj)
        )
        o, _ = naive(q, k, v, F.logsigmoid(g) / theirs.gate_logit_normalizer)
        return gate_heads(theirs, o, x, theirs.g_norm_swish_gate)

    return GatedLinearAttention(h * p, h, chunk_len=8), theirs, weights, run


def compare_retention(h: int, p: int) -> tuple[nn.Module, nn.Module, dict[str, Tensor], Callable]:
    layer = peers.load("fla.layers.multiscale_retention").MultiScaleRetention
    naive = peers.load("fla.ops.retention.naive").naive_retention
    theirs = draw_parameters(layer(hidden_size=h * p, num_heads=h, expand_v=1.0), torch.float32)
    weights = name_weights(
        theirs, k_proj="k_proj", v_proj="v_proj", g_proj="g_proj", norm_weight="g_norm_swish_gate"
    )
    rotate = peers.load("fla.modules.rotary").rotary_embedding_ref

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(f(x), h) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        angles = torch.arange(x.shape[1])[:, None] * theirs.rotary.inv_freq
        q, k = (rotate(z, angles.cos(), angles.sin()) for z in (q, k))
        o = naive(*(z.transpose(1, 2) for z in (q, k, v))).transpose(1, 2)
        return gate_heads(theirs, o, x, theirs.g_norm_swish_gate)

    return Retention(h * p, h, chunk_len=8), theirs, weights, run


def compare_hgrn2(h: int, p: int) -> tuple[nn.Module, nn.Module, dict[str, Tensor], Callable]:
    layer = peers.load("fla.layers.hgrn2").HGRN2Attention
    naive = peers.load("fla.ops.gla.naive").naive_recurrent_gla
    theirs = draw_parameters(layer(hidden_size=h * p, expand_ratio=p), torch.float32)
    weights = name_weights(theirs, k_proj="f_proj", v_proj="i_proj", norm_weight="g_norm")

    def run(x: Tensor) -> Tensor:
        g = F.logsigmoid(theirs.f_proj(x))
        g = torch.logaddexp(torch.tensor(0.25).log(), torch.tensor(0.75).log() + g)
        q, k, v, g = (
            heads(z, h) for z in (F.silu(theirs.q_proj(x)), 1 - g.exp(), theirs.i_proj(x), g)
        )
        o = rearrange(naive(q, k, v, g)[0], "b t h p -> b t (h p)")
        return theirs.o_proj(F.rms_norm(o, o.shape[-1:], theirs.g_norm.weight, theirs.g_norm.eps))

    return HGRN2(h * p, h, lower_bound=0.25, chunk_len=8), theirs, weights, run


@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_mlstm_is_that_of_transformers(seed: int, b: int, h: int, t: int, p: int):
    options = {"num_heads": h, "qk_dim_factor": 1.0, "norm_reduction_force_float32": False}
    module = peers.load("transformers.models.xlstm.modeling_xlstm")
    settings = peers.load("transformers.models.xlstm.configuration_xlstm").xLSTMConfig(
        hidden_size=h * p, norm_eps=1e-5, **options
    )
    theirs = draw_parameters(module.xLSTMLayer(settings))
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "ogate_preact"}
    names |= {"i_proj": "igate_preact", "f_proj": "fgate_preact", "norm_weight": "multihead_norm"}
    weights = name_weights(theirs, **names, out_proj="out_proj")
    weights |= {f"{g}_proj.bias": theirs.get_parameter(f"{g}gate_preact.bias") for g in "if"}
    loop = module.mlstm_recurrent_sequence_native
    theirs.mlstm_backend.forward = lambda **given: loop(
        **given, eps=0.0, dtype_state=torch.float64, return_last_states=True
    )
    x = 3 * draw_normal(b, t, h * p, seed=seed)  # gates are open, and closed, by turns
    ours = MLSTM(h * p, h, chunk_len=8).double()
    assert_agree(ours, weights, theirs, lambda x: theirs(x)[0], x, 4 * ROUNDINGS)


@pytest.mark.filterwarnings("ignore:According to Bo")
@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_rwkv6_is_that_of_flash_linear_attention(seed: int, b: int, h: int, t: int, p: int):
    d = h * p
    layer = peers.load("fla.layers.rwkv6").RWKV6Attention
    naive = peers.load("fla.ops.rwkv6.recurrent_naive").naive_recurrent_rwkv6
    shift = peers.load("fla.modules.token_shift").token_shift_ref
    ranks = {"proj_low_rank_dim": 3, "gate_low_rank_dim": 5}
    theirs = draw_parameters(
        layer(hidden_size=d, num_heads=h, expand_k=1.0, **ranks), torch.float32
    )
    del theirs.g_norm.bias
    parameter = theirs.get_parameter
    # Theirs shifts the gate's input too; they have five mixtures in the order r, w, k, v, gate.
    ours_of = [0, 2, 3, 1]
    up = parameter("x_proj.2.weight").view(d, 5, 3)
    weights = {
        "mix_shift": parameter("x_proj.0.mu"),
        "mix_bias": parameter("x_bias")[ours_of],
        "mix_down.weight": parameter("x_proj.0.linear.weight").view(5, 3, d)[ours_of].flatten(0, 1),
        "mix_up": up.transpose(0, 1)[ours_of],
        "decay_down.weight": parameter("w_proj.linear.lora.0.weight"),
        "decay_up.weight": parameter("w_proj.linear.lora.2.weight"),
        "decay_up.bias": parameter("w_proj.linear.lora.2.bias"),
        "bonus": parameter("bonus"),
        "norm_weight": parameter("g_norm.weight"),
        "q_proj.weight": parameter("r_proj.linear.weight"),
        "out_proj.weight": parameter("o_proj.weight"),
    }
    weights |= {f"{z}_proj.weight": parameter(f"{z}_proj.linear.weight") for z in "kvg"}

    def run(x: Tensor) -> Tensor:
        delta = shift(x)
        low = theirs.x_proj[1](theirs.x_proj[0](x, delta)).unflatten(-1, (5, 3))
        mix = torch.einsum("btnr,hnr->btnh", low, up) + theirs.x_bias
        r, w, k, v, _ = mix.unbind(-2)
        r, w, k, v = (
            heads(f(x, z, delta), h).transpose(1, 2)
            for f, z in (
                (theirs.r_proj, r),
                (theirs.w_proj, w),
                (theirs.k_proj, k),
                (theirs.v_proj, v),
            )
        )
        o = naive(r, k, v, -w.exp(), theirs.bonus, scale=1.0)[0].transpose(1, 2)
        o = F.group_norm(
            o.flatten(0, 1).flatten(1), h, theirs.g_norm.weight, None, theirs.g_norm.eps
        )
        return theirs.o_proj(o.unflatten(0, x.shape[:2]) * F.silu(theirs.g_proj.linear(x)))

    ours = RWKV6(d, h, mix_rank=3, decay_rank=5, chunk_len=8)
    x = draw_normal(b, t, d, dtype=torch.float32, seed=seed)
    assert_agree(ours, weights, theirs, run, x, ROUNDINGS)


@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_mamba3_is_that_of_its_authors(seed: int, b: int, h: int, t: int, p: int):
    d, n = h * p, 2 * p
    layer = peers.load("mamba_ssm.modules.mamba3").Mamba3
    theirs = draw_parameters(layer(d_model=d, d_state=n, expand=1, headdim=p, ngroups=h))
    widths = [d, d, h * n, h * n, h, h, h, theirs.num_rope_angles]
    z, v, k, q, dt, A, trap, angle = theirs.in_proj.weight.split(widths)
    same = {"dt_bias": "dt_bias", "D": "D", "out_proj.weight": "out_proj.weight"}
    same |= {"k_scale": "B_norm.weight", "q_scale": "C_norm.weight"}
    weights = {ours: theirs.get_parameter(name) for ours, name in same.items()}
    weights |= {"k_bias": theirs.B_bias[:, 0], "q_bias": theirs.C_bias[:, 0]}
    weights |= {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "g_proj.weight": z}
    weights |= {"rate_proj.weight": torch.cat([A, dt, trap]), "angle_proj.weight": angle}

    def turn(z: Tensor, angles: Tensor) -> Tensor:
        angles = F.pad(angles, (0, n // 2 - angles.shape[-1]))
        turned = torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def run(x: Tensor) -> Tensor:
        """Token by token, as the kernel of a decoding step has it."""
        z, v, k, q, dt, A, trap, angle = theirs.in_proj(x).split(widths, -1)
        q = F.rms_norm(heads(q, h), (n,), theirs.C_norm.weight, 1e-5) + theirs.C_bias[:, 0]
        k = F.rms_norm(heads(k, h), (n,), theirs.B_norm.weight, 1e-5) + theirs.B_bias[:, 0]
        v, dt, trap = heads(v, h), F.softplus(dt + theirs.dt_bias), trap.sigmoid()
        alpha = (-F.softplus(A).clamp(min=theirs.A_floor) * dt).exp()
        beta, gamma = alpha * dt * (1 - trap), trap * dt
        state = angles = torch.zeros((), dtype=x.dtype)
        k_before, v_before, outputs = torch.zeros_like(k[:, 0]), torch.zeros_like(v[:, 0]), []
        for i in range(t):
            angles = angles + angle[:, i, None].tanh() * torch.pi * dt[:, i, :, None]
            q_now, k_now = turn(q[:, i], angles), turn(k[:, i], angles)
            state = alpha[:, i, :, None, None] * state
            state = state + (beta[:, i, :, None] * k_before)[..., None] * v_before[..., None, :]
            state = state + (gamma[:, i, :, None] * k_now)[..., None] * v[:, i, :, None]
            outputs.append((q_now[..., None] * state).sum(-2) + theirs.D[:, None] * v[:, i])
            k_before, v_before = k_now, v[:, i]
        return theirs.out_proj(torch.stack(outputs, 1).flatten(2) * F.silu(z))

    ours = Mamba3(d, h, d_state=n, chunk_len=8).double()
    x = draw_normal(b, t, d, seed=seed)
    assert_agree(ours, weights, theirs, run, x, 4 * ROUNDINGS)


@pytest.mark.parametrize("seed", SEEDS)
def test_based_is_that_of_flash_linear_attention(seed: int):
    b, h, t, p = draw_shape(seed)
    layer = peers.load("fla.layers.based").BasedLinearAttention
    naive = peers.load("fla.ops.based.naive").naive_parallel_based
    n = 1 + seed % 6
    theirs = layer(hidden_size=h * p, feature_dim=n, num_heads=h, num_key_value_heads=h)
    theirs = draw_parameters(theirs)

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(f(x), h) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        o = naive(*(z.transpose(1, 2) for z in (q, k, v))).transpose(1, 2)
        return theirs.o_proj(rearrange(o, "b t h p -> b t (h p)"))

    ours = Based(h * p, h, d_state=n, chunk_len=8)
    weights = name_weights(theirs, k_proj="k_proj", v_proj="v_proj")
    assert_agree(ours, weights, theirs, run, draw_normal(b, t, h * p, seed=seed), ROUNDINGS)


@pytest.mark.parametrize("seed", SEEDS)
def test_log_linear_attention_is_that_of_flash_linear_attention(seed: int):
    b, h, t, p = draw_shape(seed)
    naive = peers.load("fla.ops.log_linear_attn.naive").naive_log_linear_attn
    ours = LogLinearAttention(h * p, h, n_levels=(t - 1).bit_length() + 1 + seed % 2)
    ours = draw_parameters(ours)

    def run(x: Tensor) -> Tensor:
        joint = torch.cat([f(x) for f in (ours.q_proj, ours.k_proj, ours.v_proj)], -1)
        assert ours.conv is not None
        assert ours.g_proj is not None
        q, k, v = (heads(F.silu(z), h) for z in ours.conv(joint)[0].chunk(3, -1))
        dt = F.softplus(ours.dt_proj(x))
        scales = ours.level_proj(x).unflatten(-1, (h, -1))
        scales = F.softplus(ours.level_scale * scales)
        o = naive(q, k, v * dt[..., None], -ours.A_log.exp() * dt, scales)
        o = o + ours.D[:, None] * v
        o = F.rms_norm(o, (p,), ours.norm_weight, 1e-5)
        return ours.out_proj(rearrange(o, "b t h p -> b t (h p)") * F.silu(ours.g_proj(x)))

    weights = dict(ours.named_parameters())
    assert_agree(ours, weights, ours, run, draw_normal(b, t, h * p, seed=seed), 32 * ROUNDINGS)


@pytest.mark.parametrize("compare", [compare_gla, compare_retention, compare_hgrn2])
@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_same_values_and_gradients(compare, seed: int, b: int, h: int, t: int, p: int):
    ours, theirs, weights, run = compare(h, p)
    x = draw_normal(b, t, h * p, dtype=torch.float32, seed=seed)
    assert_agree(ours, weights, theirs, run, x, ROUNDINGS)
