"""The dynamic mask: a bias for each key, added to the attention scores before the softmax.

The paper prints one reading and its authors' later code another; each is a class here, and
`MASKS` names them. All take the same constructor arguments, whether they need them or not.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.ops.attention import MASKED


class DynamicMask(nn.Module, ABC):
    """Gives every key of every head a bias.

    Args:
        n_heads: heads h.
        d_head: width p of a head's values.
        max_seq_len: the longest sequence, for the readings that learn a table of positions.

    Source: eq. dynamic_mask. Departs: added before the softmax, as in lst:dynamic_mask, not
        multiplied after it (erratum D2).
    """

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__()

    @abstractmethod
    def forward(self, v: Float[Tensor, "b h s p"]) -> Float[Tensor, "b h s"]:
        """Return the keys' biases, given the layer's values."""


class _TableMask(DynamicMask):
    """Learns a number l for each head and position; ones at the start, as the paper's."""

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        if max_seq_len < 1:
            raise ValueError(f"{max_seq_len=} must be at least 1")
        self.l = nn.Parameter(torch.ones(n_heads, max_seq_len))

    @abstractmethod
    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return the bias of a table entry."""

    def forward(self, v: Float[Tensor, "b h s p"]) -> Float[Tensor, "b h s"]:
        """Return the biases of the first s positions, the same for every row of the batch.

        Raises:
            ValueError: when the sequence is longer than the table (erratum D3).
        """
        seq_len, max_seq_len = v.shape[-2], self.l.shape[-1]
        if seq_len > max_seq_len:
            raise ValueError(
                f"sequence length {seq_len} exceeds the mask's {max_seq_len=}; raise it"
            )
        return repeat(self.bias(self.l[:, :seq_len]), "h s -> b h s", b=v.shape[0])


class LiteralMask(_TableMask):
    """Masks the keys where round(l) = 0, as printed.

    round has no gradient and neither has a mask, so l stays at one and the layer is plain causal
    attention for ever (erratum D1).

    Source: eq. dynamic_mask, lst:dynamic_mask.
    """

    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return `MASKED` where round(l) = 0, zero elsewhere."""
        return torch.where(table.detach().round() == 0, MASKED, 0.0).to(table.dtype)


class StraightThroughMask(LiteralMask):
    """Masks as `LiteralMask` does, and hands the bias's gradient to l as if b = l.

    A masked key has attention exactly zero, so no gradient ever brings it back: the mask only
    closes, except in rows where every key is masked.

    Departs: lst:dynamic_mask has no gradient (erratum D1).
    """

    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return the literal bias, with the gradient of l."""
        return super().bias(table) + (table - table.detach())


class SoftMask(_TableMask):
    """Masks by degrees: b = log σ(l), so a key's attention is weighted by σ(l) in (0, 1).

    Ones at the start make the bias constant, which the softmax cancels, where σ is far from flat
    (db/dl = σ(-1) ≈ 0.27): plain causal attention that can learn.

    Departs: eq. dynamic_mask rounds (erratum D1).
    """

    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return log σ(l), below zero."""
        return F.logsigmoid(table)


class ValueMask(DynamicMask):
    """Lets a key's own value decide: b = exp(A·softplus(dt(v))), v flat over the heads.

    A [h] is zero at the start, so b = 1 for every key, which the softmax cancels; dt gets its
    first gradient once A has moved. The bias is positive, in (0, 1] while A ≤ 0 and unbounded
    above for A > 0.

    Source: the authors' later code. Departs: eq. dynamic_mask looks at positions only.
    """

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        self.dt = nn.Linear(n_heads * d_head, n_heads, bias=False)
        self.A = nn.Parameter(torch.zeros(n_heads))

    def forward(self, v: Float[Tensor, "b h s p"]) -> Float[Tensor, "b h s"]:
        """Return the biases that the values ask for."""
        dt = F.softplus(self.dt(rearrange(v, "b h s p -> b s (h p)")))
        return rearrange(torch.exp(self.A * dt), "b s h -> b h s")


class OracleMask(DynamicMask):
    """Keeps exactly the keys it is told through `stored`: an upper bound on what a mask can do."""

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        self.keep: Bool[Tensor, "b s"] | None = None

    def forward(self, v: Float[Tensor, "b h s p"]) -> Float[Tensor, "b h s"]:
        """Return zero for the kept keys and `MASKED` for the others.

        Raises:
            ValueError: outside `stored`, or when its `keep` has another shape than [b s].
        """
        if self.keep is None:
            raise ValueError(
                "mask='oracle' does not know which keys to keep: "
                "call the model inside `with stored(model, keep):`, keep bool [b t]"
            )
        batch, n_heads, seq_len, _ = v.shape
        if self.keep.shape != (batch, seq_len):
            raise ValueError(f"keep has shape {list(self.keep.shape)}, not {[batch, seq_len]}")
        bias = torch.where(self.keep.to(v.device), 0.0, MASKED).to(v.dtype)
        return repeat(bias, "b s -> b h s", h=n_heads)


@contextmanager
def stored(model: nn.Module, keep: Bool[Tensor, "b t"]) -> Iterator[None]:
    """Tell every `OracleMask` of a model which keys to keep, for the length of a `with` block.

    Raises:
        ValueError: when the model has no such mask.
    """
    masks = [m for m in model.modules() if isinstance(m, OracleMask)]
    if not masks:
        raise ValueError("the model has no oracle mask: build its attention with mask='oracle'")
    before = [m.keep for m in masks]
    for mask in masks:
        mask.keep = keep
    try:
        yield
    finally:
        for mask, old in zip(masks, before, strict=True):
            mask.keep = old


MASKS: dict[str, type[DynamicMask]] = {
    "literal": LiteralMask,
    "straight-through": StraightThroughMask,
    "soft": SoftMask,
    "value": ValueMask,
    "oracle": OracleMask,
}
