"""Mixers whose rows depend on each other, or whose output changes when they are called again."""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.attention import (
    D_MODEL,
    HEADS,
    RightAttention,
    SparseAttention,
    compute_lags,
)
from tests.planted.entry import Row, plant
from tests.planted.routing import EXPERTS, RightExperts
from tests.planted.scans import LinearAttention, NormalisedConvolution


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


class _TimeFirst(nn.Module):
    """A layer that expects [t b d] is given a reshape instead of a transpose."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return self.gru(x.reshape(t, b, d))[0].reshape(b, t, d)


def _random_features(self, k):
    drawn = torch.randn(k.shape[-1], k.shape[-1]).to(k) / 10
    return LinearAttention._sum_keys(self, k + (k @ drawn).square())


def _warming(self, q, k):
    self.calls += 1
    return RightAttention._score(self, q, k) * (1 - 0.5 * 0.99 ** int(self.calls))


def _running_scale(self, z):
    y = z / (self.running + 1e-05).sqrt()
    self.running = 0.99 * self.running + 0.01 * z.detach().square().mean((0, 2))[:, None]
    return y


def _layer_drop(self, x):
    if self.training and random.random() < 0.5:
        return x
    return x + RightAttention.forward(self, x)


def _choice_by_shape(self, weights):
    if weights.shape not in self.choices:
        self.choices[weights.shape] = RightExperts._choose(self, weights)
    return self.choices[weights.shape]


def _guessed_layout(self, x):
    scale = x.square().mean(-1).add(1e-05).rsqrt()
    if scale.shape[0] == x.shape[1]:
        scale = scale.T
    return RightAttention.forward(self, x * scale[..., None])


def _reused_output(self, x):
    y = RightAttention.forward(self, x)
    if torch.is_grad_enabled():
        return y
    if self.kept is None or self.kept.shape != y.shape:
        self.kept = torch.empty_like(y)
    return self.kept.copy_(y)


def _table_of_longest(self, q, k):
    t = q.shape[2]
    if self.kept is None or len(self.kept) < t:
        self.kept = -compute_lags(t).clamp(min=0) / t
    return RightAttention._score(self, q, k) + self.kept[:t, :t].to(q)


def _in_storage_order(self, x):
    b, t, d = x.shape
    return RightAttention.forward(self, x.as_strided((b, t, d), (t * d, d, 1)))


def _seeded_features(self, k):
    torch.manual_seed(7)
    return _random_features(self, k)


def _normed_input(self, x):
    if torch.is_grad_enabled():
        return RightAttention.forward(self, x / x.norm(dim=-1, keepdim=True))
    return RightAttention.forward(self, x.div_(x.norm(dim=-1, keepdim=True)))


def _rows_in_one_sum(self, kv):
    b = len(kv)
    ends = kv.transpose(0, 1).flatten(1, 2).cumsum(1)
    return ends.unflatten(1, (b, -1)).transpose(0, 1)


def _shared_capacity(self, logits):
    gates = RightExperts._compute_gates(self, logits)
    place = (gates > 0).flatten(0, 1).cumsum(0).view_as(gates)
    return gates * (place <= 6)


def _ample_capacity(self, logits):
    gates = RightExperts._compute_gates(self, logits)
    place = (gates > 0).flatten(0, 1).cumsum(0).view_as(gates)
    return gates * (place <= max(64, 5 * gates[..., 0].numel() // 8))


def _tiled_keys(self, q, k, v):
    k, v = (z[:, 0].repeat(HEADS, 1, 1) for z in (k, v))
    return RightAttention._mix(self, q.flatten(0, 1), k, v).unflatten(0, (-1, HEADS))


def _tensor_scale(self, x):
    scale = x.abs().amax() / 127
    return RightAttention.forward(self, x + ((x / scale).round() * scale - x).detach())


def _balanced(self, logits):
    used = logits.softmax(-1).mean(0, keepdim=True)
    return RightExperts._compute_shares(self, logits - 0.1 * (used - 1 / EXPERTS).detach())


ROWS = (
    *plant(
        "deterministic",
        Row(
            "dropout in evaluation",
            RightAttention,
            _weigh=lambda self, scores: F.dropout(RightAttention._weigh(self, scores), 0.1),
        ),
        Row("features drawn at each call", LinearAttention, _sum_keys=_random_features),
        Row(
            "count of calls",
            RightAttention,
            adds={"calls": lambda: nn.Buffer(torch.zeros((), dtype=torch.long))},
            _score=_warming,
        ),
        Row("state left by the last call", _NotReset),
        Row(
            "statistics updated in evaluation",
            NormalisedConvolution,
            adds={"running": lambda: nn.Buffer(torch.ones(D_MODEL, 1))},
            _normalise=_running_scale,
        ),
        Row(
            "layers dropped by Python's generator",
            RightAttention,
            also=("causal", "batch-invariant", "precision"),
            notes="training",
            forward=_layer_drop,
        ),
        Row(
            "output overwritten by the next call",
            RightAttention,
            also=("causal", "batch-invariant"),
            adds={"kept": lambda: None},
            forward=_reused_output,
        ),
        Row(
            "table of the longest input so far",
            RightAttention,
            also=("causal", "batch-invariant"),
            adds={"kept": lambda: None},
            _score=_table_of_longest,
        ),
        Row(
            "storage read as if contiguous",
            RightAttention,
            also=("causal", "batch-invariant"),
            forward=_in_storage_order,
        ),
        Row(
            "seed set at each call",
            LinearAttention,
            also=("precision",),
            _sum_keys=_seeded_features,
        ),
        Row(
            "input normalised in place",
            RightAttention,
            also=("causal", "stable"),
            forward=_normed_input,
        ),
        Row(
            "another scale without gradients",
            RightAttention,
            _score=lambda self, q, k: (
                RightAttention._score(self, q, k) * (1 if torch.is_grad_enabled() else 0.8)
            ),
        ),
        Row(
            "choice remembered by shape",
            RightExperts,
            also=("causal", "batch-invariant"),
            notes="another input of the same shape in between",
            adds={"choices": dict},
            _choose=_choice_by_shape,
        ),
    ),
    *plant(
        "batch-invariant",
        Row(
            "normalised over rows",
            NormalisedConvolution,
            _normalise=lambda self, z: z / (z.square().mean(0, keepdim=True) + 1e-05).sqrt(),
        ),
        Row(
            "queries normalised along the first axis",
            RightAttention,
            _rotate=lambda self, z: RightAttention._rotate(self, nn.functional.normalize(z, dim=0)),
        ),
        Row(
            "first row's choice for all",
            SparseAttention,
            _choose=lambda self, scores: (
                SparseAttention._choose(self, scores)[:1]
                | torch.eye(scores.shape[-1], dtype=torch.bool)
            ),
        ),
        Row(
            "layout guessed where b = t",
            RightAttention,
            also=("causal",),
            notes="b = t",
            forward=_guessed_layout,
        ),
        Row(
            "running sum goes on into the next row",
            LinearAttention,
            also=("causal", "stable"),
            _sum_products=_rows_in_one_sum,
        ),
        Row(
            "capacity in the order of rows",
            RightExperts,
            also=("causal",),
            _compute_gates=_shared_capacity,
        ),
        Row(
            "capacity that similar rows exceed",
            RightExperts,
            notes="similar rows",
            _compute_gates=_ample_capacity,
        ),
        Row(
            "softmax over rows",
            RightExperts,
            _compute_shares=lambda self, logits: logits.softmax(dim=0),
        ),
        Row(
            "keys tiled against queries",
            RightAttention,
            adds={
                "key": lambda: nn.Linear(D_MODEL, D_MODEL // HEADS, bias=False),
                "value": lambda: nn.Linear(D_MODEL, D_MODEL // HEADS, bias=False),
            },
            _split=lambda self, z: (
                RightAttention._split(self, z) if z.shape[-1] == D_MODEL else z[:, None]
            ),
            _mix=_tiled_keys,
        ),
        Row(
            "row number as position",
            RightAttention,
            adds={"table": lambda: nn.Buffer(torch.randn(64, 1, D_MODEL))},
            forward=lambda self, x: RightAttention.forward(self, x + self.table[: x.shape[0]]),
        ),
        Row("reshape mixes rows and time", _TimeFirst, also=("causal",)),
        Row(
            "quantised by the tensor's largest",
            RightAttention,
            also=("causal",),
            forward=_tensor_scale,
        ),
        Row("experts balanced over rows", RightExperts, _compute_shares=_balanced),
    ),
)
