"""Mixers that decay and write, as the layers of flash-linear-attention and transformers compute.

The former's call kernels that a CPU does not run; their steps are written out here, on their
weights, around its naive recurrences.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lab import peers
from lab.layers.family.based import Based
from lab.layers.family.gla import GatedLinearAttention
from lab.layers.family.hgrn2 import HGRN2
from lab.layers.family.linear_attention import LinearAttention
from lab.layers.family.log_linear import LogLinearAttention
from lab.layers.family.mamba3 import Mamba3
from lab.layers.family.mlstm import MLSTM
from lab.layers.family.retnet import Retention
from lab.layers.family.rwkv6 import RWKV6
from tests.parity.compare import Comparison, Shape, compare_with


def make_theirs(s: Shape, name: str, cls: str, **options: Any) -> Any:
    layer = getattr(peers.load(f"fla.layers.{name}"), cls)
    return s.draw(layer(hidden_size=s.d, **options))


def name_weights(theirs: nn.Module, **same: str) -> dict[str, Tensor]:
    """Return their parameters by our names."""
    same = {"q_proj": "q_proj", "out_proj": "o_proj"} | same
    return {
        ours if "norm" in ours or "bias" in ours else f"{ours}.weight": theirs.get_parameter(
            f"{name}.weight"
        )
        for ours, name in same.items()
    }


def merge(o: Tensor) -> Tensor:
    return rearrange(o, "b t h p -> b t (h p)")


def gate_heads(theirs: Any, o: Tensor, x: Tensor, norm: Any) -> Tensor:
    o = F.rms_norm(o, o.shape[-1:], norm.weight, norm.eps)
    return theirs.o_proj(merge(o) * F.silu(theirs.g_proj(x)))


def compare_linear(s: Shape) -> Comparison:
    """Sums and weights by one call, since to the divisor theirs adds 1e-10 and ours 1e-6."""
    normalised = bool(s.seed % 2)
    options = {"feature_map": "elu", "output_norm": "identity", "num_heads": s.h}
    theirs = make_theirs(s, "linear_attn", "LinearAttention", **options)
    naive = peers.load("fla.ops.linear_attn.naive").naive_recurrent_linear_attn

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(f(x)) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        q, k = theirs.feature_map_q(q), theirs.feature_map_k(k)
        o, total = naive(q, k, F.pad(v, (0, 1), value=1.0), scale=1.0)[0].split([s.p, 1], -1)
        return theirs.o_proj(merge(o / (total + 1e-6) if normalised else o))

    ours = LinearAttention(s.d, s.h, normalise=normalised, chunk_len=8)
    return Comparison(ours, name_weights(theirs, k_proj="k_proj", v_proj="v_proj"), theirs, run)


def compare_gla(s: Shape) -> Comparison:
    options = {"num_heads": s.h, "expand_k": 1.0, "gate_low_rank_dim": 1 + s.seed % 5}
    theirs = make_theirs(s, "gla", "GatedLinearAttention", **options)
    naive = peers.load("fla.ops.gla.naive").naive_recurrent_gla
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
        parts = theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.gk_proj
        q, k, v, g = (s.heads(f(x)) for f in parts)
        o, _ = naive(q, k, v, F.logsigmoid(g) / theirs.gate_logit_normalizer)
        return gate_heads(theirs, o, x, theirs.g_norm_swish_gate)

    ours = GatedLinearAttention(s.d, s.h, gate_rank=1 + s.seed % 5, chunk_len=8)
    return Comparison(ours, weights, theirs, run)


def compare_retention(s: Shape) -> Comparison:
    options = {"num_heads": s.h, "expand_v": 1.0}
    theirs = make_theirs(s, "multiscale_retention", "MultiScaleRetention", **options)
    naive = peers.load("fla.ops.retention.naive").naive_retention
    names = {f"{name}_proj": f"{name}_proj" for name in "kvg"}
    weights = name_weights(theirs, **names, norm_weight="g_norm_swish_gate")
    rotate = peers.load("fla.modules.rotary").rotary_embedding_ref

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(f(x)) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        frequencies = theirs.rotary._compute_inv_freq()
        angles = torch.arange(s.t)[:, None] * frequencies
        q, k = (rotate(z, angles.cos(), angles.sin()) for z in (q, k))
        o = naive(*(z.transpose(1, 2) for z in (q, k, v))).transpose(1, 2)
        return gate_heads(theirs, o, x, theirs.g_norm_swish_gate)

    return Comparison(Retention(s.d, s.h, chunk_len=8), weights, theirs, run)


def compare_hgrn2(s: Shape) -> Comparison:
    bound = (0.25, 0.5, 0.9)[s.seed % 3]
    theirs = make_theirs(s, "hgrn2", "HGRN2Attention", expand_ratio=s.p)
    naive = peers.load("fla.ops.gla.naive").naive_recurrent_gla
    weights = name_weights(theirs, k_proj="f_proj", v_proj="i_proj", norm_weight="g_norm")

    def run(x: Tensor) -> Tensor:
        floor, rest = torch.tensor([bound, 1 - bound], dtype=x.dtype).log()
        g = torch.logaddexp(floor, rest + F.logsigmoid(theirs.f_proj(x)))
        parts = F.silu(theirs.q_proj(x)), 1 - g.exp(), theirs.i_proj(x), g
        o = merge(naive(*(s.heads(z) for z in parts))[0])
        return theirs.o_proj(F.rms_norm(o, o.shape[-1:], theirs.g_norm.weight, theirs.g_norm.eps))

    return Comparison(HGRN2(s.d, s.h, lower_bound=bound, chunk_len=8), weights, theirs, run)


def compare_mlstm(s: Shape) -> Comparison:
    """x is larger, so that gates are open and closed by turns."""
    options = {"num_heads": s.h, "qk_dim_factor": 1.0, "norm_reduction_force_float32": False}
    module = peers.load("transformers.models.xlstm.modeling_xlstm")
    settings = peers.load("transformers.models.xlstm.configuration_xlstm").xLSTMConfig(
        hidden_size=s.d, norm_eps=1e-5, **options
    )
    theirs = s.draw(module.xLSTMLayer(settings))
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "ogate_preact"}
    names |= {"i_proj": "igate_preact", "f_proj": "fgate_preact", "norm_weight": "multihead_norm"}
    weights = name_weights(theirs, **names, out_proj="out_proj")
    weights |= {f"{g}_proj.bias": theirs.get_parameter(f"{g}gate_preact.bias") for g in "if"}
    loop = module.mlstm_recurrent_sequence_native
    theirs.mlstm_backend.forward = lambda **given: loop(
        **given, eps=0.0, dtype_state=s.dtype, return_last_states=True
    )
    ours = MLSTM(s.d, s.h, chunk_len=8)
    return Comparison(ours, weights, theirs, lambda x: theirs(x)[0])


def compare_rwkv6(s: Shape) -> Comparison:
    rank, gate_rank = 1 + s.seed % 5, 1 + s.seed % 4
    options = {"num_heads": s.h, "expand_k": 1.0}
    options |= {"proj_low_rank_dim": rank, "gate_low_rank_dim": gate_rank}
    theirs = make_theirs(s, "rwkv6", "RWKV6Attention", **options)
    naive = peers.load("fla.ops.rwkv6.recurrent_naive").naive_recurrent_rwkv6
    shift = peers.load("fla.modules.token_shift").token_shift_ref
    del theirs.g_norm.bias
    parameter = theirs.get_parameter
    # Theirs shifts the gate's input too; they have five mixtures in the order r, w, k, v, gate.
    ours_of = [0, 2, 3, 1]
    up = parameter("x_proj.2.weight").view(s.d, 5, rank)
    down = parameter("x_proj.0.linear.weight").view(5, rank, s.d)
    weights = {
        "mix_shift": parameter("x_proj.0.mu"),
        "mix_bias": parameter("x_bias")[ours_of],
        "mix_down.weight": down[ours_of].flatten(0, 1),
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
        low = theirs.x_proj[1](theirs.x_proj[0](x, delta)).unflatten(-1, (5, rank))
        mix = torch.einsum("btnr,hnr->btnh", low, up) + theirs.x_bias
        parts = zip("rwkv", mix.unbind(-2), strict=False)
        r, w, k, v = (
            s.heads(getattr(theirs, f"{name}_proj")(x, z, delta)).transpose(1, 2)
            for name, z in parts
        )
        o = naive(r, k, v, -w.exp(), theirs.bonus, scale=1.0)[0].transpose(1, 2)
        norm = theirs.g_norm
        o = F.group_norm(o.flatten(0, 1).flatten(1), s.h, norm.weight, None, norm.eps)
        return theirs.o_proj(o.unflatten(0, x.shape[:2]) * F.silu(theirs.g_proj.linear(x)))

    ours = RWKV6(s.d, s.h, mix_rank=rank, decay_rank=gate_rank, chunk_len=8)
    return Comparison(ours, weights, theirs, run)


def compare_mamba3(s: Shape) -> Comparison:
    """Their layer's weights, in the equation of the paper, token by token; ranks from 1 to 3.

    Their kernels for several inputs and outputs rotate other pairs of channels than those for one,
    which is a permutation of the weights.
    """
    d, h, n, r = s.d, s.h, 2 * s.p, 1 + s.seed % 3
    module = peers.load("mamba_ssm.modules.mamba3")
    options = {"d_state": n, "expand": 1, "headdim": s.p, "ngroups": h}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mamba3_mimo_combined", "a kernel, which nothing here calls")
        theirs: Any = s.draw(module.Mamba3(d, is_mimo=r > 1, mimo_rank=r, **options))
    widths = [d, d, r * h * n, r * h * n, h, h, h, theirs.num_rope_angles]
    z, v, k, q, dt, A, trap, angle = theirs.in_proj.weight.split(widths)
    same = {"dt_bias": "dt_bias", "D": "D", "out_proj.weight": "out_proj.weight"}
    same |= {"k_scale": "B_norm.weight", "q_scale": "C_norm.weight"}
    weights = {ours: theirs.get_parameter(name) for ours, name in same.items()}
    weights |= {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "g_proj.weight": z}
    weights |= {"rate_proj.weight": torch.cat([A, dt, trap]), "angle_proj.weight": angle}
    q_bias, k_bias = theirs.C_bias.transpose(0, 1), theirs.B_bias.transpose(0, 1)  # [r h n]
    weights |= {"k_bias": k_bias.flatten(0, 1), "q_bias": q_bias.flatten(0, 1)}
    mimo = {}
    if r > 1:
        mimo = {f"mimo_{name}": getattr(theirs, f"mimo_{name}").transpose(0, 1) for name in "xzo"}
    x_scale, z_scale, o_scale = mimo.values() if r > 1 else torch.ones(3, dtype=s.dtype)

    def turn(z: Tensor, angles: Tensor) -> Tensor:
        angles = F.pad(angles, (0, n // 2 - angles.shape[-1]))[:, None]
        turned = torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def run(x: Tensor) -> Tensor:
        z, v, k, q, dt, A, trap, angle = theirs.in_proj(x).split(widths, -1)
        q, k = (rearrange(z, "b t (r h n) -> b t r h n", r=r, h=h) for z in (q, k))
        q = F.rms_norm(q, (n,), theirs.C_norm.weight, 1e-5) + q_bias
        k = F.rms_norm(k, (n,), theirs.B_norm.weight, 1e-5) + k_bias
        z, v = (s.heads(y)[:, :, None] * scale for y, scale in ((z, z_scale), (v, x_scale)))
        dt, trap = F.softplus(dt + theirs.dt_bias), trap.sigmoid()
        alpha = (-F.softplus(A).clamp(min=theirs.A_floor) * dt).exp()
        beta, gamma = alpha * dt * (1 - trap), trap * dt
        state, angles = x.new_zeros(s.b, h, n, s.p), x.new_zeros(s.b, h, theirs.num_rope_angles)
        before, outputs = torch.zeros_like(state), []
        for i in range(s.t):
            angles = angles + angle[:, i, None].tanh() * torch.pi * dt[:, i, :, None]
            written = torch.einsum("brhn,brhp->bhnp", turn(k[:, i], angles), v[:, i])
            a, b, c = (rate[:, i, :, None, None] for rate in (alpha, beta, gamma))
            state, before = a * state + b * before + c * written, written
            y = torch.einsum("brhn,bhnp->brhp", turn(q[:, i], angles), state)
            y = (y + theirs.D[:, None] * v[:, i]) * F.silu(z[:, i])
            outputs.append((y * o_scale).sum(1))
        return theirs.out_proj(torch.stack(outputs, 1).flatten(2))

    ours = Mamba3(d, h, d_state=n, mimo_rank=r, chunk_len=8)
    return Comparison(ours, weights | mimo, theirs, run)


def compare_based(s: Shape) -> Comparison:
    n = 1 + s.seed % 6
    options = {"feature_dim": n, "num_heads": s.h, "num_key_value_heads": s.h}
    theirs = make_theirs(s, "based", "BasedLinearAttention", **options)
    naive = peers.load("fla.ops.based.naive").naive_parallel_based

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(f(x)) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        return theirs.o_proj(merge(naive(*(z.transpose(1, 2) for z in (q, k, v))).transpose(1, 2)))

    weights = name_weights(theirs, k_proj="k_proj", v_proj="v_proj")
    return Comparison(Based(s.d, s.h, d_state=n, chunk_len=8), weights, theirs, run)


def compare_loglinear(s: Shape) -> Comparison:
    naive = peers.load("fla.ops.log_linear_attn.naive").naive_log_linear_attn
    n_levels = (s.t - 1).bit_length() + 1 + s.seed % 2
    ours: Any = s.draw(LogLinearAttention(s.d, s.h, n_levels=n_levels))

    def run(x: Tensor) -> Tensor:
        joint = torch.cat([f(x) for f in (ours.q_proj, ours.k_proj, ours.v_proj)], -1)
        q, k, v = (s.heads(F.silu(z)) for z in ours.conv(joint)[0].chunk(3, -1))
        dt = F.softplus(ours.dt_proj(x))
        scales = ours.level_proj(x).unflatten(-1, (s.h, -1))
        scales = F.softplus(ours.level_scale * scales)
        o = naive(q, k, v * dt[..., None], -ours.A_log.exp() * dt, scales)
        o = F.rms_norm(o + ours.D[:, None] * v, (s.p,), ours.norm_weight, 1e-5)
        return ours.out_proj(merge(o) * F.silu(ours.g_proj(x)))

    return compare_with(ours, run)
