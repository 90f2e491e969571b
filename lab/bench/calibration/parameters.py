"""Parameters that do not learn, and rows of tables that nothing selects."""

import math

import torch
from torch import Tensor, nn

from lab.bench.calibration.attention import D_MODEL, HEADS, Attention, behind
from lab.bench.calibration.entry import Fault
from lab.bench.calibration.routing import SIDE, Experts, ProductKeys, Table
from lab.bench.calibration.scans import Convolution


class _Detached(Convolution):
    """The gate is detached from the graph."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, D_MODEL)
        self.gate = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        z = self._convolved(self.enter(x).mT).mT
        return self.out(z * self.gate(x).detach().sigmoid())


class _Unused(Attention):
    """A scale of the keys is made and never applied."""

    def __init__(self):
        super().__init__()
        self.key_scale = nn.Parameter(torch.ones(D_MODEL))


class _TimesZero(Attention):
    """A branch is weighted by a coefficient left at zero."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.zeros(()))
        self.branch = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.share * self.branch(x)


class _HardChoice(Experts):
    """The chosen experts have equal weights, so the router gets no gradient."""

    def _gates(self, logits: Tensor) -> Tensor:
        return self._chosen(logits).to(logits) / 2


class _SumOfOne(Experts):
    """The one chosen expert's weight is divided by the sum of the chosen: always one."""

    def _gates(self, logits: Tensor) -> Tensor:
        weights = logits.softmax(-1)
        kept = weights * (weights >= weights.amax(-1, keepdim=True))
        return kept / kept.sum(-1, keepdim=True)


class _Rounded(Attention):
    """The step of a quantiser is learned through a rounding, which has no gradient."""

    def __init__(self):
        super().__init__()
        self.bits = nn.Parameter(torch.full((D_MODEL,), 8.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.bits.round() / 8)


class _AsNumber(Attention):
    """The temperature of the scores is read out as a Python number."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super()._scores(q, k) * math.exp(self.temperature.item())


class _Clamped(Convolution):
    """A scale is clamped to [0, 1] and begins above."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.full((D_MODEL,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.share.clamp(0, 1)


class _FloorOfRoot(Table):
    """Rows are named by two digits of the floor of the root: 16 of 20."""

    def _row(self, share: Tensor) -> Tensor:
        side = math.isqrt(self.n_rows)
        return (share * side**2).long().clamp(max=side**2 - 1)


class _EvenRows(Table):
    """The hash has a factor in common with the number of rows."""

    def _row(self, share: Tensor) -> Tensor:
        return (share * 200).long() * 6 % self.n_rows


class _LastRow(Table):
    """The share is scaled by the last row's number and floored, so the last is never named."""

    def _row(self, share: Tensor) -> Tensor:
        return (share * (self.n_rows - 1)).long().clamp(max=self.n_rows - 2)


class _WrongStride(ProductKeys):
    """The first half's index is multiplied by half the number of keys."""

    def _value(self, first: Tensor, second: Tensor) -> Tensor:
        return first * (SIDE // 2) + second


class _DeadExpert(Experts):
    """One expert's logit begins so low that no token ever chooses it."""

    def _shares(self, logits: Tensor) -> Tensor:
        return super()._shares(logits - torch.tensor([0.0, 0.0, 0.0, 1e4]).to(logits))


class _BothDirections(Attention):
    """Half the buckets of distances are kept for keys ahead, which the mask hides."""

    def __init__(self):
        super().__init__()
        self.distance = nn.Embedding(16, HEADS)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        lag = behind(q.shape[2])
        bucket = lag.abs().clamp(max=7) + 8 * (lag < 0)
        return super()._scores(q, k) + self.distance(bucket).movedim(-1, 0)


PARAMETERS = (
    Fault("branch detached", "gradient reach", _Detached),
    Fault("parameter never used", "gradient reach", _Unused),
    Fault("branch times zero", "gradient reach", _TimesZero),
    Fault("router by choice alone", "gradient reach", _HardChoice),
    Fault("weight of one over its sum", "gradient reach", _SumOfOne),
    Fault("gradient lost in rounding", "gradient reach", _Rounded),
    Fault("parameter read as a number", "gradient reach", _AsNumber),
    Fault("clamped where it begins", "gradient reach", _Clamped, notes="weights as built"),
    Fault("floor of a root", "table reach", _FloorOfRoot),
    Fault("hash skips rows", "table reach", _EvenRows),
    Fault("last row never named", "table reach", _LastRow),
    Fault("stride of half the keys", "table reach", _WrongStride),
    Fault("expert never chosen", "table reach", _DeadExpert),
    Fault("buckets for keys ahead", "table reach", _BothDirections),
)
