"""Parameters that do not learn, wrong derivatives and forms, lost precision, unbounded growth."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.planted import derivatives as functions
from tests.planted.attention import (
    D_MODEL,
    HEADS,
    CosineAttention,
    RightAttention,
    ShownAttention,
    compute_lags,
)
from tests.planted.derivatives import CustomBackward
from tests.planted.entry import Row, plant
from tests.planted.routing import SIDE, ProductKeys, RightExperts, Table
from tests.planted.scanned import StateSpace
from tests.planted.scans import (
    Average,
    Convolution,
    Forgetting,
    LinearAttention,
    NormalisedConvolution,
    Retention,
)


def _detached(self, x):
    z = self._convolve(self.enter(x).mT).mT
    return self.out(z * self.gate(x).detach().sigmoid())


def _sum_of_one(self, logits):
    weights = logits.softmax(-1)
    kept = weights * (weights >= weights.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)


def _floor_of_root(self, share):
    side = math.isqrt(self.n_rows)
    return (share * side**2).long().clamp(max=side**2 - 1)


def _both_directions(self, q, k):
    lag = compute_lags(q.shape[2])
    bucket = lag.abs().clamp(max=7) + 8 * (lag < 0)
    return RightAttention._score(self, q, k) + self.distance(bucket).movedim(-1, 0)


def _other_gelu(self, z):
    y = Convolution._convolve(self, z)
    return F.gelu(y, approximate="tanh" if torch.compiler.is_compiling() else "none")


def _unmasked_compiled(self, scores):
    if torch.compiler.is_compiling():
        return (scores - 10 * ~self._make_mask(scores.shape[-1])).softmax(dim=-1)
    return RightAttention._weigh(self, scores)


def _detached_compiled(self, k):
    total = LinearAttention._sum_keys(self, k)
    return total.detach() if torch.compiler.is_compiling() else total


def _scale_not_shown(self, x):
    q, k = (self._rotate(self._split(map(x))) for map in (self.query, self.key))
    return self._weigh(q @ k.mT)


def _positions_not_shown(self, x):
    q, k = (self._split(map(x)) for map in (self.query, self.key))
    return self._weigh(self._score(q, k))


def _shown_without_mask(self, x):
    q, k = (self._rotate(self._split(map(x))) for map in (self.query, self.key))
    return self._score(q, k).softmax(-1) * (compute_lags(x.shape[1]) >= 0)


def _angles_of_input(self, z):
    angles = torch.arange(z.shape[2]).to(z)[:, None] * torch.tensor([0.9, 0.03]).to(z)
    z1, z2 = z.chunk(2, dim=-1)
    cos, sin = (angles.cos(), angles.sin())
    return torch.cat([z1 * cos - z2 * sin, z2 * cos + z1 * sin], dim=-1)


def _clipped(self, i, h):
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return h


def _rates_of_input(self, z):
    rates = (10_000.0 ** -(torch.arange(z.shape[-1] // 2) / (z.shape[-1] // 2))).to(z)
    high = torch.promote_types(z.dtype, torch.float32)
    angles = torch.arange(z.shape[2])[:, None] * rates.to(high)
    z1, z2 = z.chunk(2, dim=-1)
    cos, sin = angles.cos().to(z), angles.sin().to(z)
    return torch.cat([z1 * cos - z2 * sin, z2 * cos + z1 * sin], dim=-1)


def _differences(self, rate, z):
    total = rate.cumsum(-1)
    decay = (total[:, None, :] - total[:, :, None]).masked_fill(
        compute_lags(rate.shape[1]) < 0, -torch.inf
    )
    return decay.exp() @ z


def _two_factors(self, rate, z):
    total = rate.cumsum(-1)[..., None]
    return (-total).exp() * (total.exp() * z).cumsum(1)


def _no_maximum(self, scores):
    powers = scores.exp() * self._make_mask(scores.shape[-1])
    return powers / powers.sum(-1, keepdim=True)


def _half_inside(self, q, k, v):
    weights = self._weigh(self._score(q, k))
    return (weights.bfloat16() @ v.bfloat16()).to(v)


def _square_of_mean(self, z):
    z = z + 300
    mean = z.mean(1, keepdim=True)
    variance = z.square().mean(1, keepdim=True) - mean.square()
    return (z - mean) / (variance.clamp(min=0) + 1e-05).sqrt()


def _sum_window(self, z):
    total = z.cumsum(2)
    return total - F.pad(total, (0, 0) * (z.ndim - 3) + (4, 0)).narrow(2, 0, z.shape[2])


def _raw_positions(self, x):
    ramp = 0.05 * torch.arange(x.shape[1]).to(x)
    return RightAttention.forward(self, x + F.pad(ramp[:, None], (0, D_MODEL - 1)))


def _never_forgets(self, x):
    z, gate, B, C, dt = StateSpace._project_in(self, x)
    return (z + 1, gate, B + 1, C, dt)


NUMBERS = (
    *plant(
        "gradient reach",
        Row(
            "branch detached",
            Convolution,
            adds={
                "enter": lambda: nn.Linear(D_MODEL, D_MODEL),
                "gate": lambda: nn.Linear(D_MODEL, D_MODEL),
            },
            forward=_detached,
        ),
        Row(
            "parameter never used",
            RightAttention,
            adds={"key_scale": lambda: nn.Parameter(torch.ones(D_MODEL))},
        ),
        Row(
            "branch times zero",
            RightAttention,
            adds={
                "share": lambda: nn.Buffer(torch.zeros(())),
                "branch": lambda: nn.Linear(D_MODEL, D_MODEL),
            },
            forward=lambda self, x: RightAttention.forward(self, x) + self.share * self.branch(x),
        ),
        Row(
            "router by choice alone",
            RightExperts,
            _compute_gates=lambda self, logits: self._choose(logits).to(logits) / 2,
        ),
        Row("weight of one over its sum", RightExperts, _compute_gates=_sum_of_one),
        Row(
            "gradient lost in rounding",
            RightAttention,
            adds={"bits": lambda: nn.Parameter(torch.full((D_MODEL,), 8.3))},
            forward=lambda self, x: RightAttention.forward(self, x * self.bits.round() / 8),
        ),
        Row(
            "parameter read as a number",
            RightAttention,
            adds={"temperature": lambda: nn.Parameter(torch.tensor(0.5))},
            _score=lambda self, q, k: (
                RightAttention._score(self, q, k) * math.exp(self.temperature.item())
            ),
        ),
        Row(
            "clamped where it begins",
            Convolution,
            notes="weights as built",
            adds={"share": lambda: nn.Parameter(torch.full((D_MODEL,), 1.5))},
            forward=lambda self, x: Convolution.forward(self, x) * self.share.clamp(0, 1),
        ),
    ),
    *plant(
        "table reach",
        Row("floor of a root", Table, _choose_row=_floor_of_root),
        Row(
            "hash skips rows",
            Table,
            _choose_row=lambda self, share: (share * 200).long() * 6 % self.n_rows,
        ),
        Row(
            "last row never named",
            Table,
            _choose_row=lambda self, share: (
                (share * (self.n_rows - 1)).long().clamp(max=self.n_rows - 2)
            ),
        ),
        Row(
            "stride of half the keys",
            ProductKeys,
            _index_value=lambda self, first, second: first * (SIDE // 2) + second,
        ),
        Row(
            "expert never chosen",
            RightExperts,
            _compute_shares=lambda self, logits: RightExperts._compute_shares(
                self, logits - torch.tensor([0.0, 0.0, 0.0, 10000.0]).to(logits)
            ),
        ),
        Row(
            "buckets for keys ahead",
            RightAttention,
            adds={"distance": lambda: nn.Embedding(16, HEADS)},
            _score=_both_directions,
        ),
    ),
    *plant(
        "gradient is the derivative",
        Row("backward without the product rule", CustomBackward, function=functions._FirstTerm),
        Row(
            "forward mode without the product rule", CustomBackward, function=functions._HalfTangent
        ),
        Row(
            "backward loses the borders of chunks", CustomBackward, function=functions._FirstOfChunk
        ),
        Row(
            "state detached every 32 tokens",
            Average,
            _pass_on=lambda self, i, h: h.detach() if i % 32 == 31 else h,
        ),
        Row("hook that clips small gradients", Average, _pass_on=_clipped),
        Row("backward a thousandth too large", CustomBackward, function=functions._FromOutput),
    ),
    *plant(
        "twice differentiable",
        Row("backward out of the graph", CustomBackward, function=functions._Once),
        Row("backward partly out of the graph", CustomBackward, function=functions._DetachedSwish),
    ),
    *plant(
        "forms agree",
        Row("another gelu when compiled", Convolution, notes="compiled", _convolve=_other_gelu),
        Row(
            "finite mask when compiled", RightAttention, notes="compiled", _weigh=_unmasked_compiled
        ),
        Row(
            "gradient cut when compiled",
            LinearAttention,
            notes="compiled",
            _sum_keys=_detached_compiled,
        ),
    ),
    *plant(
        "matrix applies",
        Row("scale not in the matrix", ShownAttention, matrix=_scale_not_shown),
        Row("rotations not in the matrix", ShownAttention, matrix=_positions_not_shown),
        Row("matrix masked after its softmax", ShownAttention, matrix=_shown_without_mask),
    ),
    *plant(
        "precision",
        Row("angles in the input's precision", CosineAttention, _rotate=_angles_of_input),
        Row("rates in the input's precision", RightAttention, _rotate=_rates_of_input),
        Row("decays from differences of a sum", Forgetting, _mix=_differences),
        Row("decays as two factors", Forgetting, also=("stable",), _mix=_two_factors),
        Row("softmax without the largest taken off", CosineAttention, _weigh=_no_maximum),
        Row("bf16 inside", RightAttention, _mix=_half_inside),
        Row(
            "fp16 scores",
            RightAttention,
            _weigh=lambda self, scores: RightAttention._weigh(self, scores.half().to(scores)),
        ),
        Row("variance as a difference", NormalisedConvolution, _normalise=_square_of_mean),
        Row(
            "sliding sum as a difference",
            LinearAttention,
            _make_positive=lambda self, z: (4 * z).exp(),
            _sum_products=lambda self, kv: self._sum_window(kv),
            _sum_keys=lambda self, k: self._sum_window(k),
            _sum_window=_sum_window,
        ),
        Row(
            "bias by the key's position",
            RightAttention,
            _rotate=lambda self, z: z,
            _score=lambda self, q, k: (
                RightAttention._score(self, q, k) + torch.arange(k.shape[2]).to(q)
            ),
        ),
    ),
    *plant(
        "stable",
        Row("no denominator", LinearAttention, _sum_keys=lambda self, k: torch.ones_like(k)),
        Row(
            "one decay above one",
            Retention,
            adds={"decay": lambda: torch.tensor([0.5, 0.75, 0.9, 1.01])},
        ),
        Row("raw positions added", RightAttention, forward=_raw_positions),
        Row(
            "never forgets",
            StateSpace,
            adds={"A_log": lambda: nn.Parameter(torch.full((HEADS,), -12.0))},
            _project_in=_never_forgets,
        ),
    ),
)
