"""Mixers whose output changes when they are called again."""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.attention import D_MODEL, RightAttention
from tests.planted.entry import Fault
from tests.planted.routing import RightExperts
from tests.planted.scans import LinearAttention, NormalisedConvolution


class _AlwaysDropped(RightAttention):
    """Functional dropout, which also drops in evaluation."""

    def _weigh(self, scores: Tensor) -> Tensor:
        return F.dropout(super()._weigh(scores), 0.1)


class _RandomFeatures(LinearAttention):
    """Random features are drawn anew in each call."""

    def _sum_keys(self, k: Tensor) -> Tensor:
        drawn = torch.randn(k.shape[-1], k.shape[-1]).to(k) / 10
        return super()._sum_keys(k + (k @ drawn).square())


class _Warming(RightAttention):
    """A counter of calls, meant for training, sharpens the scores."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        self.calls += 1
        return super()._score(q, k) * (1 - 0.5 * 0.99 ** int(self.calls))


class _NotReset(nn.Module):
    """A recurrence starts from the state that the last call left."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL, batch_first=True)
        self.register_buffer("hidden", torch.zeros(1, 1, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.gru(x, self.hidden.expand(-1, len(x), -1).contiguous())
        self.hidden = last.detach()[:, :1]
        return y


class _RunningScale(NormalisedConvolution):
    """Running statistics are updated in evaluation too, after they are used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.ones(D_MODEL, 1))

    def _normalise(self, z: Tensor) -> Tensor:
        y = z / (self.running + 1e-5).sqrt()
        self.running = 0.99 * self.running + 0.01 * z.detach().square().mean((0, 2))[:, None]
        return y


class _LayerDrop(RightAttention):
    """In training a branch is dropped by Python's generator, which torch's seed does not set."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + super().forward(x)


class _ChoiceByShape(RightExperts):
    """The choice of experts is cached by shape and reused for later inputs of that shape."""

    def __init__(self):
        super().__init__()
        self.choices: dict[torch.Size, Tensor] = {}

    def _choose(self, weights: Tensor) -> Tensor:
        if weights.shape not in self.choices:
            self.choices[weights.shape] = super()._choose(weights)
        return self.choices[weights.shape]


REPEATS = (
    Fault("dropout in evaluation", "deterministic", _AlwaysDropped),
    Fault("features drawn at each call", "deterministic", _RandomFeatures),
    Fault("count of calls", "deterministic", _Warming),
    Fault("state left by the last call", "deterministic", _NotReset),
    Fault("statistics updated in evaluation", "deterministic", _RunningScale),
    Fault(
        "layers dropped by Python's generator",
        "deterministic",
        _LayerDrop,
        ("causal", "batch-invariant", "precision"),
        "training",
    ),
    Fault(
        "choice remembered by shape",
        "deterministic",
        _ChoiceByShape,
        ("causal", "batch-invariant"),
        "another input of the same shape in between",
    ),
)
