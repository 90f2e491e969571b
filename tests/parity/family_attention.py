"""Relatives of softmax attention, as flash-linear-attention and transformers compute them.

The former's layers call kernels that a CPU does not run; their steps are written out here, on their
weights, around its naive forms.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from lab import peers
from lab.layers.family.differential import DifferentialAttention
from lab.layers.family.distance import ALiBi, ForgettingAttention
from lab.layers.family.sliding_window import SlidingWindowAttention
from lab.layers.family.stickbreaking import StickBreakingAttention
from lab.ops.rope import rotary_table
from tests.parity.compare import Comparison, Shape, compare_with, modules


def merge(z: Tensor) -> Tensor:
    return rearrange(z, "b t h p -> b t (h p)")


def compare_alibi(s: Shape) -> Comparison:
    """MPT's slopes are the formula's where heads are a power of two; others are two series."""
    h = 2 ** (s.seed % 3)
    settings = peers.load("transformers.models.mpt.configuration_mpt").MptConfig(
        d_model=s.d, n_heads=h
    )
    theirs = s.draw(modules("mpt").MptAttention(settings))
    later = torch.ones(s.t, s.t, dtype=torch.bool).triu(1)

    def run(x: Tensor) -> Tensor:
        slopes = modules("mpt").build_mpt_alibi_tensor(h, s.t)
        return theirs(x, slopes, attention_mask=later)[0]

    parts = zip("qkv", theirs.Wqkv.weight.chunk(3), strict=True)
    weights = {f"{name}.weight": z for name, z in parts}
    weights["out.weight"] = theirs.out_proj.weight
    return Comparison(ALiBi(s.d, h), weights, theirs, run)


def compare_forgetting(s: Shape) -> Comparison:
    layer = peers.load("fla.layers.forgetting_attn").ForgettingAttention
    naive = peers.load("fla.ops.forgetting_attn.naive").naive_forgetting_attn
    theirs = s.draw(layer(hidden_size=s.d, num_heads=s.h))

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(f(x)) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        return theirs.o_proj(merge(naive(q, k, v, F.logsigmoid(theirs.f_proj(x)))))

    weights = {f"{name}.weight": theirs.get_parameter(f"{name}_proj.weight") for name in "qkvf"}
    weights |= {"f.bias": theirs.f_proj.bias, "out.weight": theirs.o_proj.weight}
    return Comparison(ForgettingAttention(s.d, s.h), weights, theirs, run)


def compare_window(s: Shape) -> Comparison:
    """Forgetting attention whose gates forget nothing, with a window."""
    naive = peers.load("fla.ops.forgetting_attn.naive").naive_forgetting_attn
    size = 2 + s.seed % 8
    ours = s.draw(SlidingWindowAttention(s.d, s.h, window=size, position="none"))

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(f(x)) for f in (ours.q, ours.k, ours.v))
        return ours.out(merge(naive(q, k, v, x.new_zeros(s.b, s.t, s.h), window_size=size)))

    return compare_with(ours, run)


def compare_stickbreaking(s: Shape) -> Comparison:
    naive = peers.load("fla.ops.stickbreaking_attn.naive").naive_stickbreaking_attn
    current = bool(s.seed % 2)
    ours = s.draw(StickBreakingAttention(s.d, s.h, current=current))

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(f(x)) for f in (ours.q, ours.k, ours.v))
        return ours.out(merge(naive(q, k, v, attend_current=current)[0]))

    return compare_with(ours, run)


def compare_differential(s: Shape) -> Comparison:
    """Theirs has heads of half the width; number i and number h + i make one of ours."""
    config: Any = peers.load("transformers.models.diffllama.configuration_diffllama")
    config = config.DiffLlamaConfig(
        hidden_size=s.d,
        num_attention_heads=2 * s.h,
        num_key_value_heads=2 * s.h,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = s.draw(modules("diffllama").DiffLlamaAttention(config, s.seed % 4))
    mask = torch.full((s.t, s.t), -torch.inf, dtype=s.dtype).triu(1)[None, None]
    table = rotary_table(torch.arange(s.t), s.p // 2, dtype=s.dtype)
    angles = [torch.cat([z, z], -1)[None] for z in table]

    def pair(name: str) -> Tensor:
        return rearrange(
            theirs.get_parameter(f"{name}_proj.weight"), "(two h n) d -> (h two n) d", two=2, h=s.h
        )

    weights = {f"{name}.weight": pair(name) for name in "qkv"}
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    weights["lambdas"] = torch.stack([theirs.get_parameter(name) for name in names])
    weights |= {"out.weight": theirs.o_proj.weight, "norm_weight": torch.ones(s.p, dtype=s.dtype)}
    ours = DifferentialAttention(s.d, s.h, lambda_init=theirs.lambda_init)
    return Comparison(ours, weights, theirs, lambda x: theirs(x, angles, mask)[0])
