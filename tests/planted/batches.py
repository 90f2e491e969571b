"""Mixers whose rows depend on each other."""

import torch
from torch import Tensor, nn

from tests.planted.attention import D_MODEL, HEADS, RightAttention, SparseAttention
from tests.planted.entry import Fault
from tests.planted.routing import EXPERTS, RightExperts
from tests.planted.scans import LinearAttention, NormalisedConvolution


class _BatchNorm(NormalisedConvolution):
    """Each token's channels are normalised over the rows."""

    def _normalise(self, z: Tensor) -> Tensor:
        return z / (z.square().mean(0, keepdim=True) + 1e-5).sqrt()


class _QueryNorm(RightAttention):
    """Queries are normalised along the first axis, which is right only without a batch axis."""

    def _rotate(self, z: Tensor) -> Tensor:
        return super()._rotate(nn.functional.normalize(z, dim=0))


class _FirstRowsChoice(SparseAttention):
    """The first row's choice of keys is used for all rows."""

    def _choose(self, scores: Tensor) -> Tensor:
        return super()._choose(scores)[:1] | torch.eye(scores.shape[-1], dtype=torch.bool)


class _GuessedLayout(RightAttention):
    """Scales [b t] are mistaken for [t b] if there are as many rows as tokens."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.square().mean(-1).add(1e-5).rsqrt()
        if scale.shape[0] == x.shape[1]:
            scale = scale.T
        return super().forward(x * scale[..., None])


class _RowsInOneSum(LinearAttention):
    """Rows are concatenated, and the running sum is not reset between them."""

    def _sum_products(self, kv: Tensor) -> Tensor:
        b = len(kv)
        ends = kv.transpose(0, 1).flatten(1, 2).cumsum(1)
        return ends.unflatten(1, (b, -1)).transpose(0, 1)


class _SharedCapacity(RightExperts):
    """An expert takes at most six tokens of the batch, in the order of the rows."""

    def _compute_gates(self, logits: Tensor) -> Tensor:
        gates = super()._compute_gates(logits)
        place = (gates > 0).flatten(0, 1).cumsum(0).view_as(gates)
        return gates * (place <= 6)


class _AmpleCapacity(RightExperts):
    """An expert takes five eighths of the batch's tokens, at least 64, in the order of the rows."""

    def _compute_gates(self, logits: Tensor) -> Tensor:
        gates = super()._compute_gates(logits)
        place = (gates > 0).flatten(0, 1).cumsum(0).view_as(gates)
        return gates * (place <= max(64, 5 * gates[..., 0].numel() // 8))


class _FirstAxis(RightExperts):
    """The router's softmax runs along the first axis, the batch."""

    def _compute_shares(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=0)


class _TiledKeys(RightAttention):
    """Queries are flattened as (row, head), the one key-value head is tiled as (head, row)."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(D_MODEL, D_MODEL // HEADS, bias=False)
        self.value = nn.Linear(D_MODEL, D_MODEL // HEADS, bias=False)

    def _split(self, z: Tensor) -> Tensor:
        return super()._split(z) if z.shape[-1] == D_MODEL else z[:, None]

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (z[:, 0].repeat(HEADS, 1, 1) for z in (k, v))
        return super()._mix(q.flatten(0, 1), k, v).unflatten(0, (-1, HEADS))


class _RowNumber(RightAttention):
    """Positions are looked up as if for [t b d]: every row gets the one of its row number."""

    table: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(64, 1, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[: x.shape[0]])


class _TimeFirst(nn.Module):
    """A layer that expects [t b d] is given a reshape instead of a transpose."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return self.gru(x.reshape(t, b, d))[0].reshape(b, t, d)


class _TensorScale(RightAttention):
    """Inputs are rounded to 8 bits of the largest number in the batch, straight-through."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 127
        return super().forward(x + (((x / scale).round() * scale) - x).detach())


class _Balanced(RightExperts):
    """Experts' logits are lowered by their use in the batch at each position."""

    def _compute_shares(self, logits: Tensor) -> Tensor:
        used = logits.softmax(-1).mean(0, keepdim=True)
        return super()._compute_shares(logits - 0.1 * (used - 1 / EXPERTS).detach())


BATCHES = (
    Fault("normalised over rows", "batch-invariant", _BatchNorm),
    Fault("queries normalised along the first axis", "batch-invariant", _QueryNorm),
    Fault("first row's choice for all", "batch-invariant", _FirstRowsChoice),
    Fault("layout guessed where b = t", "batch-invariant", _GuessedLayout, ("causal",), "b = t"),
    Fault("running sum goes on into the next row", "batch-invariant", _RowsInOneSum, ("causal",)),
    Fault("capacity in the order of rows", "batch-invariant", _SharedCapacity, ("causal",)),
    Fault(
        "capacity that similar rows exceed", "batch-invariant", _AmpleCapacity, notes="similar rows"
    ),
    Fault("softmax over rows", "batch-invariant", _FirstAxis),
    Fault("keys tiled against queries", "batch-invariant", _TiledKeys),
    Fault("row number as position", "batch-invariant", _RowNumber),
    Fault("reshape mixes rows and time", "batch-invariant", _TimeFirst, ("causal",)),
    Fault("quantised by the tensor's largest", "batch-invariant", _TensorScale, ("causal",)),
    Fault("experts balanced over rows", "batch-invariant", _Balanced),
)
