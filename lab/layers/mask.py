"""The dynamic mask: a bias for each key, added to the attention scores before the softmax.

A key's bias is known when the key is, from its value and its position, so a decoder reckons it
once. The paper prints one reading and its authors' later code another; each is a class here, and
`MASKS` names them. All take the same constructor arguments, whether they need them or not.
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
from lab.ops.precision import own_precision

Positions = Int[Tensor, " s"] | Int[Tensor, "b s"]
"""Where keys stand: [s] for 0 … s-1 in every row, [b s] for anywhere."""


class DynamicMask(nn.Module, ABC):
    """Gives every key of every head a bias.

    Attributes:
        relative: whether a key's bias stays when all positions shift.

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


def _last(positions: Positions) -> int:
    """Return the furthest position; without a look at the tensor where its shape tells.

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
    """Learns a number l for each head and position; ones at the start, as the paper's."""

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        if max_seq_len < 1:
            raise ValueError(f"{max_seq_len=} must be at least 1")
        self.l = nn.Parameter(torch.ones(n_heads, max_seq_len))

    @abstractmethod
    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return the bias of a table entry."""

    def forward(self, v: Float[Tensor, "b h s p"], positions: Positions) -> Float[Tensor, "b h s"]:
        """Return the biases of the keys' positions, whatever the values.

        Raises:
            ValueError: for a position before the table or past it (erratum D3).
        """
        last, max_seq_len = _last(positions), self.l.shape[-1]
        if last >= max_seq_len:
            raise ValueError(
                f"position {last} is beyond the mask's table of {max_seq_len=}; raise it"
            )
        if positions.ndim == 1:
            return repeat(self.bias(self.l[:, : last + 1]), "h s -> b h s", b=v.shape[0])
        return rearrange(self.bias(self.l)[:, positions], "h b s -> b h s")


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

    No lower than `MASKED`, where the weight is exactly zero already, so that padding stays below.

    Ones at the start make the bias constant, which the softmax cancels, where σ is far from flat
    (db/dl = σ(-1) ≈ 0.27): plain causal attention that can learn.

    Departs: eq. dynamic_mask rounds (erratum D1).
    """

    def bias(self, table: Float[Tensor, "h s"]) -> Float[Tensor, "h s"]:
        """Return log σ(l), from `MASKED` to zero."""
        return F.logsigmoid(table).clamp(min=MASKED)


class ValueMask(DynamicMask):
    """Lets a key's own value decide: b = exp(A·softplus(dt(v))), v flat over the heads.

    A [h] is zero at the start, so b = 1 for every key, which the softmax cancels; dt gets its
    first gradient once A has moved. The bias is positive, in (0, 1] while A ≤ 0 and unbounded
    above for A > 0.

    Source: the authors' later code. Departs: eq. dynamic_mask looks at positions only.
    """

    relative = True

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        self.dt = nn.Linear(n_heads * d_head, n_heads, bias=False)
        self.A = nn.Parameter(torch.zeros(n_heads))

    def forward(self, v: Float[Tensor, "b h s p"], positions: Positions) -> Float[Tensor, "b h s"]:
        """Return the biases that the values ask for, wherever they stand, in fp32 at least.

        In bf16 many of them would be equal, and a window would keep whichever stands later.
        """
        high = torch.promote_types(v.dtype, torch.float32)
        with own_precision(v):
            flat = rearrange(v, "b h s p -> b s (h p)").to(high)
            dt = F.softplus(F.linear(flat, self.dt.weight.to(high)))
            return rearrange(torch.exp(self.A.to(high) * dt), "b s h -> b h s")


class OracleMask(DynamicMask):
    """Keeps exactly the positions it is told of by `stored`: an upper bound on what a mask can do.

    What it is told belongs to positions of the sequence, padding not counted, so it is not
    relative: the same tokens further on are other entries.
    """

    def __init__(self, n_heads: int, d_head: int, max_seq_len: int):
        super().__init__(n_heads, d_head, max_seq_len)
        self.keep: Bool[Tensor, "b n"] | None = None

    def forward(self, v: Float[Tensor, "b h s p"], positions: Positions) -> Float[Tensor, "b h s"]:
        """Return zero for the kept keys and `MASKED` for the others.

        Raises:
            ValueError: outside `stored`, when its `keep` is of another batch, or for a position
                before or past it.
        """
        if self.keep is None:
            raise ValueError(
                "mask='oracle' does not know which keys to keep: "
                "call the model inside `with stored(model, keep):`, keep bool [b t]"
            )
        batch, n_heads = v.shape[:2]
        if self.keep.shape[0] != batch:
            raise ValueError(f"keep is of a batch of {self.keep.shape[0]}, not {batch}")
        last, known = _last(positions), self.keep.shape[1]
        if last >= known:
            raise ValueError(f"position {last} is beyond the {known} that keep tells of")
        keep = self.keep.to(v.device)
        keep = keep[:, : last + 1] if positions.ndim == 1 else keep.gather(1, positions)
        bias = torch.where(keep, 0.0, MASKED).to(v.dtype)
        return repeat(bias, "b s -> b h s", h=n_heads)


def has_oracle_mask(module: nn.Module) -> bool:
    """Whether a model or a layer has an `OracleMask`, which must be told what to keep."""
    return any(isinstance(part, OracleMask) for part in module.modules())


@contextmanager
def stored(model: nn.Module, keep: Bool[Tensor, "b n"]) -> Iterator[None]:
    """Tell every `OracleMask` of a model which positions to keep, for a `with` block's length.

    `keep` reaches as far as the sequence will, decoded tokens included; it may reach further.

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
