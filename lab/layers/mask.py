"""The dynamic mask: a bias for each key, added to the attention scores before the softmax.

A key's bias depends on its value and its position alone, so a decoder computes it once. The paper
prints one reading and its authors' later code another; each is a class here, and `MASKS` names
them. All take the same constructor arguments, whether they need them or not.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.ops.attention import MASKED
from lab.ops.precision import disable_autocast

Positions = Int[Tensor, " s"] | Int[Tensor, "b s"]
"""Positions of the keys: [s] is 0 … s-1 in every row, [b s] is arbitrary."""


class DynamicMask(nn.Module, ABC):
    """Gives every key of every head a bias.

    Attributes:
        relative: whether a key's bias stays the same when all positions shift.

    Args:
        n_heads: heads h of keys and values.
        d_head: width p of a head's values.
        max_seq_len: the longest sequence, for the readings that learn a table of positions.

    Source: eq. dynamic_mask. Departs: added before the softmax, as in lst:dynamic_mask, not
        multiplied after it (erratum D2).
    """

    relative: bool = False

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__()

    @abstractmethod
    def forward(self, v: Float[Tensor, "b h s p"], positions: Positions) -> Float[Tensor, "b h s"]:
        """Return the keys' biases, given their values and where they stand."""


def _find_last(positions: Positions) -> int:
    """Return the largest position; from the shape alone where that is enough.

    Raises:
        ValueError: for a position before the first.
    """
    if positions.ndim == 1:
        return positions.shape[0] - 1
    first, last = torch.stack(positions.aminmax()).tolist()
    if first < 0:
        raise ValueError(f"position {first} must be at least 0 for a mask that looks it up")
    return last


class _TableMask(DynamicMask):
    """Learns a number l for each head and position; starts with ones, as in the paper."""

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        if max_seq_len < 1:
            raise ValueError(f"{max_seq_len=} must be at least 1")
        self.l = nn.Parameter(torch.ones(n_heads, max_seq_len))

    @abstractmethod
    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return the bias of each table entry."""

    def forward(self, v: Float[Tensor, "b h s p"], positions: Positions) -> Float[Tensor, "b h s"]:
        """Return the biases of the keys' positions; the values have no influence.

        Raises:
            ValueError: for a position before the table or past it (erratum D3).
        """
        last, max_seq_len = _find_last(positions), self.l.shape[-1]
        if last >= max_seq_len:
            raise ValueError(
                f"position {last} is beyond the mask's table of {max_seq_len=}; raise it"
            )
        if positions.ndim == 1:
            return repeat(self.bias(self.l[:, : last + 1]), "h s -> b h s", b=v.shape[0])
        return rearrange(self.bias(self.l)[:, positions], "h b s -> b h s")


class LiteralMask(_TableMask):
    """Masks the keys where round(l) = 0, as printed.

    Neither rounding nor a mask has a gradient, so l stays at one and the layer is plain causal
    attention for ever (erratum D1).

    Source: eq. dynamic_mask, lst:dynamic_mask.
    """

    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return `MASKED` where round(l) = 0, zero elsewhere."""
        return torch.where(table.detach().round() == 0, MASKED, 0.0).to(table.dtype)


class StraightThroughMask(LiteralMask):
    """Masks as `LiteralMask` does, and passes the bias's gradient to l as if b = l.

    The attention to a masked key is exactly zero, so no gradient ever unmasks it, except in rows
    where every key is masked.

    Departs: lst:dynamic_mask has no gradient (erratum D1).
    """

    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return the literal bias, with the gradient of l."""
        return super().bias(table) + (table - table.detach())


class SoftMask(_TableMask):
    """Masks gradually: b = log σ(l), so the attention to a key is weighted by σ(l) in (0, 1).

    b is at least `MASKED`, where the weight is exactly zero already, so that padding stays below.

    Since l starts at ones, the bias starts constant and cancels in the softmax, while
    db/dl = σ(-1) ≈ 0.27 is far from zero: plain causal attention that can learn.

    Departs: eq. dynamic_mask rounds (erratum D1).
    """

    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return log σ(l), from `MASKED` to zero."""
        return F.logsigmoid(table).clamp(min=MASKED)


class _PreciseLinear(nn.Linear):
    """A linear map that computes in its input's precision, whatever that of its weight is."""

    def forward(self, input: Float[Tensor, "*axes i"]) -> Float[Tensor, "*axes o"]:
        """Return x Wᵀ in x's dtype."""
        assert self.bias is None
        return F.linear(input, self.weight.to(input.dtype))


class ValueMask(DynamicMask):
    """Computes the bias from the key's own value: b = exp(A·softplus(dt(v))).

    v has the values of all heads side by side. A [h] starts at zero, so b = 1 for every key, which
    cancels in the softmax; dt gets its first gradient once A has moved. The bias is positive: in
    (0, 1] while A ≤ 0, and unbounded for A > 0.

    Source: the authors' later code. Departs: eq. dynamic_mask depends on positions only.
    """

    relative = True

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        self.dt = _PreciseLinear(n_heads * d_head, n_heads, bias=False)
        self.A = nn.Parameter(torch.zeros(n_heads))

    def forward(self, v: Float[Tensor, "b h s p"], positions: Positions) -> Float[Tensor, "b h s"]:
        """Return the biases, in fp32 at least; positions have no influence.

        In bf16 many biases would be equal, and a window would keep the later of equal keys.
        """
        high = torch.promote_types(v.dtype, torch.float32)
        with disable_autocast(v):
            flat = rearrange(v, "b h s p -> b s (h p)").to(high)
            dt = F.softplus(self.dt(flat).to(high))
            return rearrange(torch.exp(self.A.to(high) * dt), "b s h -> b h s")


class OracleMask(DynamicMask):
    """Keeps exactly the positions that `reveal_stored` names: an upper bound for any mask.

    Not relative: the names are positions in the sequence (padding not counted), so the same
    tokens further on are other entries.
    """

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        self.keep: Bool[Tensor, "b n"] | None = None

    def forward(self, v: Float[Tensor, "b h s p"], positions: Positions) -> Float[Tensor, "b h s"]:
        """Return zero for the kept keys and `MASKED` for the others.

        Raises:
            ValueError: outside `reveal_stored`, when its `keep` has another batch size, or for a
                position that it does not cover.
        """
        if self.keep is None:
            raise ValueError(
                "mask='oracle' does not know which keys to keep: "
                "call the model inside `with reveal_stored(model, keep):`, keep bool [b t]"
            )
        batch, n_heads = v.shape[:2]
        if self.keep.shape[0] != batch:
            raise ValueError(f"keep has a batch of {self.keep.shape[0]}, must have {batch}")
        last, known = _find_last(positions), self.keep.shape[1]
        if last >= known:
            raise ValueError(f"position {last} is beyond the {known} positions of keep")
        keep = self.keep.to(v.device)
        keep = keep[:, : last + 1] if positions.ndim == 1 else keep.gather(1, positions)
        bias = torch.where(keep, 0.0, MASKED).to(v.dtype)
        return repeat(bias, "b s -> b h s", h=n_heads)


def has_oracle_mask(module: nn.Module) -> bool:
    """Whether a model or a layer has an `OracleMask`, which must be told what to keep."""
    return any(isinstance(part, OracleMask) for part in module.modules())


@contextmanager
def reveal_stored(model: nn.Module, keep: Bool[Tensor, "b n"]) -> Iterator[None]:
    """Tell every `OracleMask` of a model which positions to keep inside a `with` block.

    `keep` must cover the whole sequence, decoded tokens included; it may be longer.

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
