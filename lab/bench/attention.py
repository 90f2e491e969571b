"""Masked attention against the unmasked call: what a bias for each key costs.

Both sides use the same q, k, v. The promised cost is at most 1.15, so the ratio of unmasked to
masked time must be at least 1/1.15. Forward and backward computes the gradients that learning the
mask needs: also that of the bias for soft and value masks; an oracle mask has none. What the
unmasked call itself costs beside its matrix products bounds what another kernel could gain.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.bench.products import record_products, time_products
from lab.bench.ratio import Ratio, time_in_turns, time_median
from lab.ops.attention import MASKED, attend

BATCH, SEQ_LEN = 4, 2048
SHAPES = ((1, 64), (4, 64), (4, 128))
"""(heads h, width p of each)."""
TARGET = 1 / 1.15
LEARNT = ("soft", "value")


def measure() -> list[Ratio]:
    """Time masked attention, forward and with its backward, in fp32 and bf16."""
    return [
        _measure(kind, dtype, n_heads, d_head, backward)
        for dtype in (torch.float32, torch.bfloat16)
        for n_heads, d_head in SHAPES
        for kind in ("soft", "value", "oracle")
        for backward in (False, True)
    ] + [_compare_products(n_heads, d_head) for n_heads, d_head in SHAPES]


def _measure(kind: str, dtype: torch.dtype, n_heads: int, d_head: int, backward: bool) -> Ratio:
    shape = (BATCH, n_heads, SEQ_LEN)
    q, k, v = _draw_inputs(n_heads, d_head, dtype)
    bias = _draw_bias(kind, shape, dtype).requires_grad_(kind in LEARNT)
    ours = _make_call(lambda: attend(q, k, v, bias), [q, k, v, bias], backward)
    theirs = _make_unmasked_call(q, k, v, backward)
    ours_s, theirs_s = time_in_turns(ours, theirs)
    name = (
        f"{kind} mask, T={SEQ_LEN}, h={n_heads}, p={d_head}, {str(dtype).removeprefix('torch.')}, "
        f"forward{' and backward' if backward else ''}, against no mask"
    )
    cost = f"costs {ours_s / theirs_s:.3f} of it"
    return Ratio.of_costs(name, 1000 * ours_s, 1000 * theirs_s, "ms", TARGET, cost)


def _compare_products(n_heads: int, d_head: int) -> Ratio:
    """Compare torch's kernel, forward and backward in fp32, with its matrix products alone."""
    call = _make_unmasked_call(*_draw_inputs(n_heads, d_head, torch.float32), backward=True)
    name = f"no mask, T={SEQ_LEN}, h={n_heads}, p={d_head}, against its matrix products alone"
    alone = time_products(record_products(call))
    return Ratio.of_costs(name, 1000 * time_median(call), 1000 * alone, "ms", None)


def _draw_inputs(n_heads: int, d_head: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw q, k and v."""
    shape = (BATCH, n_heads, SEQ_LEN, d_head)
    return [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]


def _make_unmasked_call(q: Tensor, k: Tensor, v: Tensor, backward: bool) -> Callable[[], None]:
    return _make_call(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v], backward
    )


def _draw_bias(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Draw biases like those of each kind of mask."""
    drawn = torch.randn(shape)
    if kind == "soft":
        return F.logsigmoid(drawn).to(dtype)
    if kind == "value":
        return torch.exp(-F.softplus(drawn)).to(dtype)
    return torch.where(drawn > 0, 0.0, MASKED).to(dtype)


def _make_call(
    work: Callable[[], Tensor], leaves: list[Tensor], backward: bool
) -> Callable[[], None]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def forward_only() -> None:
        with torch.no_grad():
            work()

    def both_ways() -> None:
        z = work()
        torch.autograd.grad(z, wanted, torch.ones_like(z))

    return both_ways if backward else forward_only
