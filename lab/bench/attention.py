"""Masked attention against the unmasked call: what a bias for each key costs.

Both sides use the same q, k, v. The promised cost is at most 1.15, so the ratio of unmasked to
masked time must be at least 1/1.15. Forward and backward computes the gradients that learning the
mask needs: also that of the bias for soft and value masks; an oracle mask has none.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.bench.ratio import Contest, Ratio
from lab.ops.attention import MASKED, attend

BATCH, SEQ_LEN = 4, 2048
SHAPES = ((1, 64), (4, 64), (4, 128))
"""(heads h, width p of each)."""
TARGET = 1 / 1.15
BIASES = {
    "soft": F.logsigmoid,
    "value": lambda drawn: torch.exp(-F.softplus(drawn)),
    "oracle": lambda drawn: torch.where(drawn > 0, 0.0, MASKED),
}
"""Biases like those of each kind of mask, from normal numbers."""


def measure() -> Iterator[Ratio]:
    """Time masked attention, forward and with its backward, in fp32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        for n_heads, d_head in SHAPES:
            for kind in BIASES:
                for backward in (False, True):
                    name = (
                        f"{kind} mask, T={SEQ_LEN}, h={n_heads}, p={d_head}, {str(dtype)[6:]}, "
                        f"forward{' and backward' if backward else ''}, against no mask"
                    )
                    given = n_heads, d_head, dtype, backward
                    ours, theirs = partial(_prepare, kind, *given), partial(_prepare, "", *given)
                    yield from Contest(name, ours, theirs, TARGET).measure()


def _prepare(
    kind: str, n_heads: int, d_head: int, dtype: torch.dtype, backward: bool
) -> Callable[[], object]:
    """Return a call of attention with a kind of mask, "" for none."""
    torch.manual_seed(0)
    shape = (BATCH, n_heads, SEQ_LEN, d_head)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    leaves, bias = [q, k, v], None
    if kind:
        bias = BIASES[kind](torch.randn(shape[:3])).to(dtype)
        leaves += [bias.requires_grad_()] if kind != "oracle" else []

    def work() -> Tensor:
        if bias is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attend(q, k, v, bias)

    def both_ways() -> None:
        z = work()
        torch.autograd.grad(z, leaves, torch.ones_like(z))

    return both_ways if backward else torch.no_grad()(work)
