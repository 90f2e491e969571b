"""Relatives of softmax attention, against flash-linear-attention's naive forms or their definition.

Its layers call kernels that a CPU does not run; their steps are written out here.
"""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lab import peers
from lab.layers.family.differential import DifferentialAttention
from lab.layers.family.distance import ALiBi, ForgettingAttention
from lab.layers.family.sliding_window import SlidingWindowAttention
from lab.layers.family.stickbreaking import StickBreakingAttention
from tests.normal import draw_normal
from tests.parity.compare import assert_agree, draw_parameters

ROUNDINGS = 1024
"""Their sums are in fp32, and gradients of gates are small differences of them."""
SHAPES = [(0, 1, 1, 5, 4), (1, 2, 2, 16, 6), (2, 1, 4, 33, 8)]
"""(seed, batch, heads, tokens, width of a head)."""


def split(z: Tensor, h: int) -> Tensor:
    return rearrange(z, "b t (h p) -> b t h p", h=h)


def merge(z: Tensor) -> Tensor:
    return rearrange(z, "b t h p -> b t (h p)")


def assert_same(
    ours: nn.Module, theirs: nn.Module, weights, run, seed, b, t, d, roundings=ROUNDINGS
):
    dtype = next(theirs.parameters()).dtype
    weights = {name: theirs.get_parameter(other) for name, other in weights.items()}
    assert_agree(
        ours, weights, theirs, run, draw_normal(b, t, d, dtype=dtype, seed=seed), roundings
    )


PROJECTIONS = {f"{name[0]}.weight": f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj")}
PROJECTIONS["out.weight"] = "o_proj.weight"


@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_alibi_is_its_definition(seed: int, b: int, h: int, t: int, p: int):
    ours = draw_parameters(ALiBi(h * p, h))

    def run(x: Tensor) -> Tensor:
        q, k, v = (split(f(x), h) for f in (ours.q, ours.k, ours.v))
        slopes = 2.0 ** (-8 * torch.arange(1, h + 1, dtype=x.dtype) / h)
        distance = torch.arange(t)[:, None] - torch.arange(t)
        scores = torch.einsum("bthp,bshp->bhts", q, k) / p**0.5 - slopes[:, None, None] * distance
        pattern = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        return ours.out(merge(torch.einsum("bhts,bshp->bthp", pattern, v)))

    weights = {name: name for name, _ in ours.named_parameters()}
    assert_same(ours, ours, weights, run, seed, b, t, h * p)


@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_forgetting_attention_is_flas(seed: int, b: int, h: int, t: int, p: int):
    layer = peers.load("fla.layers.forgetting_attn").ForgettingAttention
    naive = peers.load("fla.ops.forgetting_attn.naive").naive_forgetting_attn
    theirs = draw_parameters(layer(hidden_size=h * p, num_heads=h), torch.float32)

    def run(x: Tensor) -> Tensor:
        q, k, v = (split(f(x), h) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        return theirs.o_proj(merge(naive(q, k, v, F.logsigmoid(theirs.f_proj(x).float()))))

    weights = PROJECTIONS | {"f.weight": "f_proj.weight", "f.bias": "f_proj.bias"}
    assert_same(ForgettingAttention(h * p, h), theirs, weights, run, seed, b, t, h * p)


@pytest.mark.parametrize("cls", [ALiBi, ForgettingAttention])
@torch.no_grad()
def test_long_rows_are_exact_in_fp32(cls):
    """Scores here fall by hundreds along the row, of which fp32 holds five decimals."""
    mixer = draw_parameters(cls(8, 2))
    x = draw_normal(1, 1300, 8, dtype=torch.float64)
    exact = mixer(x)
    single = mixer.float()(x.float())
    assert (single - exact).abs().max() < 3e-6 * exact.abs().max()


@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_sliding_window_is_flas(seed: int, b: int, h: int, t: int, p: int):
    """Forgetting attention whose gates forget nothing, with a window."""
    naive = peers.load("fla.ops.forgetting_attn.naive").naive_forgetting_attn
    ours = SlidingWindowAttention(h * p, h, window=4, position="none")
    ours = draw_parameters(ours, torch.float32)

    def run(x: Tensor) -> Tensor:
        q, k, v = (split(f(x), h) for f in (ours.q, ours.k, ours.v))
        return ours.out(merge(naive(q, k, v, x.new_zeros(b, t, h), window_size=4)))

    weights = {name: name for name, _ in ours.named_parameters()}
    assert_same(ours, ours, weights, run, seed, b, t, h * p)


@torch.no_grad()
def test_sliding_window_keeps_no_more_than_it_reads():
    mixer = SlidingWindowAttention(8, 2, window=4)
    _, state = mixer.prefill(draw_normal(2, 20, 8, dtype=torch.float32))
    assert state.k.shape[2] == state.v.shape[2] == 4


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_stick_breaking_is_flas(seed: int, b: int, h: int, t: int, p: int, current: bool):
    naive = peers.load("fla.ops.stickbreaking_attn.naive").naive_stickbreaking_attn
    ours = draw_parameters(StickBreakingAttention(h * p, h, current=current))

    def run(x: Tensor) -> Tensor:
        q, k, v = (split(f(x), h) for f in (ours.q, ours.k, ours.v))
        return ours.out(merge(naive(q, k, v, attend_current=current)[0]))

    weights = {name: name for name, _ in ours.named_parameters()}
    assert_same(ours, ours, weights, run, seed, b, t, h * p)


@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_differential_attention_is_its_definition(seed: int, b: int, h: int, t: int, p: int):
    ours = DifferentialAttention(h * p, h, lambda_init=0.3, position="none")
    ours = draw_parameters(ours)

    def run(x: Tensor) -> Tensor:
        q, k, v = (split(f(x), h) for f in (ours.q, ours.k, ours.v))
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        first, second = (
            (torch.einsum("bthn,bshn->bhts", q[..., part], k[..., part]) / (p / 2) ** 0.5)
            .masked_fill(later, -torch.inf)
            .softmax(-1)
            for part in (slice(0, p // 2), slice(p // 2, p))
        )
        l1, m1, l2, m2 = ours.lambdas
        pattern = first - ((l1 @ m1).exp() - (l2 @ m2).exp() + 0.3) * second
        z = torch.einsum("bhts,bshp->bthp", pattern, v)
        z = z * (z.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * ours.norm_weight * 0.7
        return ours.out(merge(z))

    weights = {name: name for name, _ in ours.named_parameters()}
    assert_same(ours, ours, weights, run, seed, b, t, h * p)
