"""Parameters that do not learn, and rows of tables that no input selects."""

import math

import torch
from torch import Tensor, nn

from tests.planted.attention import D_MODEL, HEADS, RightAttention, compute_lags
from tests.planted.entry import Fault
from tests.planted.routing import SIDE, ProductKeys, RightExperts, Table
from tests.planted.scans import Convolution


class _Detached(Convolution):
    """The gate is detached from the graph."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, D_MODEL)
        self.gate = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        z = self._convolve(self.enter(x).mT).mT
        return self.out(z * self.gate(x).detach().sigmoid())


class _Unused(RightAttention):
    """A scale of the keys is created and never used."""

    def __init__(self):
        super().__init__()
        self.key_scale = nn.Parameter(torch.ones(D_MODEL))


class _TimesZero(RightAttention):
    """A branch is multiplied by a constant zero."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.zeros(()))
        self.branch = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.share * self.branch(x)


class _HardChoice(RightExperts):
    """The chosen experts have equal weights, so the router gets no gradient."""

    def _compute_gates(self, logits: Tensor) -> Tensor:
        return self._choose(logits).to(logits) / 2


class _SumOfOne(RightExperts):
    """The single chosen expert's weight is normalised over the chosen: it is always one."""

    def _compute_gates(self, logits: Tensor) -> Tensor:
        weights = logits.softmax(-1)
        kept = weights * (weights >= weights.amax(-1, keepdim=True))
        return kept / kept.sum(-1, keepdim=True)


class _RoundedGradient(RightAttention):
    """A quantiser's step is rounded, which has no gradient."""

    def __init__(self):
        super().__init__()
        self.bits = nn.Parameter(torch.full((D_MODEL,), 8.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.bits.round() / 8)


class _AsNumber(RightAttention):
    """The temperature of the scores is read as a Python number."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        return super()._score(q, k) * math.exp(self.temperature.item())


class _Clamped(Convolution):
    """A scale is clamped to [0, 1] but initialised to 1.5."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.full((D_MODEL,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.share.clamp(0, 1)


class _FloorOfRoot(Table):
    """Rows are addressed on a square grid of side ⌊√20⌋, so only 16 of 20 are reached."""

    def _choose_row(self, share: Tensor) -> Tensor:
        side = math.isqrt(self.n_rows)
        return (share * side**2).long().clamp(max=side**2 - 1)


class _EvenRows(Table):
    """The hash has a factor in common with the number of rows."""

    def _choose_row(self, share: Tensor) -> Tensor:
        return (share * 200).long() * 6 % self.n_rows


class _LastRow(Table):
    """The share is multiplied by n - 1 and floored, so the last row is never selected."""

    def _choose_row(self, share: Tensor) -> Tensor:
        return (share * (self.n_rows - 1)).long().clamp(max=self.n_rows - 2)


class _WrongStride(ProductKeys):
    """The first half's index is multiplied by half the number of keys."""

    def _index_value(self, first: Tensor, second: Tensor) -> Tensor:
        return first * (SIDE // 2) + second


class _DeadExpert(RightExperts):
    """One expert's logit is so low that no token chooses it."""

    def _compute_shares(self, logits: Tensor) -> Tensor:
        return super()._compute_shares(logits - torch.tensor([0.0, 0.0, 0.0, 1e4]).to(logits))


class _BothDirections(RightAttention):
    """Half of the distance buckets are for later keys, which the mask hides."""

    def __init__(self):
        super().__init__()
        self.distance = nn.Embedding(16, HEADS)

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        lag = compute_lags(q.shape[2])
        bucket = lag.abs().clamp(max=7) + 8 * (lag < 0)
        return super()._score(q, k) + self.distance(bucket).movedim(-1, 0)


PARAMETERS = (
    Fault("branch detached", "gradient reach", _Detached),
    Fault("parameter never used", "gradient reach", _Unused),
    Fault("branch times zero", "gradient reach", _TimesZero),
    Fault("router by choice alone", "gradient reach", _HardChoice),
    Fault("weight of one over its sum", "gradient reach", _SumOfOne),
    Fault("gradient lost in rounding", "gradient reach", _RoundedGradient),
    Fault("parameter read as a number", "gradient reach", _AsNumber),
    Fault("clamped where it begins", "gradient reach", _Clamped, notes="weights as built"),
    Fault("floor of a root", "table reach", _FloorOfRoot),
    Fault("hash skips rows", "table reach", _EvenRows),
    Fault("last row never named", "table reach", _LastRow),
    Fault("stride of half the keys", "table reach", _WrongStride),
    Fault("expert never chosen", "table reach", _DeadExpert),
    Fault("buckets for keys ahead", "table reach", _BothDirections),
)
