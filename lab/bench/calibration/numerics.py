"""Mixers that lose digits, or whose size has no bound."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.bench.calibration.attention import D_MODEL, HEADS, Attention, CosineAttention, behind
from lab.bench.calibration.entry import Fault
from lab.bench.calibration.scanned import StateSpace
from lab.bench.calibration.scans import (
    Forgetting,
    LinearAttention,
    NormalisedConvolution,
    Retention,
)


class _AnglesOfInput(CosineAttention):
    """Positions and angles are in the input's own precision."""

    def _turned(self, z: Tensor) -> Tensor:
        angles = torch.arange(z.shape[2]).to(z)[:, None] * torch.tensor([0.9, 0.03]).to(z)
        z1, z2 = z.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([z1 * cos - z2 * sin, z2 * cos + z1 * sin], dim=-1)


class _Differences(Forgetting):
    """Decays are exponentials of differences of one running sum."""

    def _mixed(self, rate: Tensor, z: Tensor) -> Tensor:
        total = rate.cumsum(-1)
        decay = (total[:, None, :] - total[:, :, None]).masked_fill(
            behind(rate.shape[1]) < 0, -torch.inf
        )
        return decay.exp() @ z


class _TwoFactors(Forgetting):
    """Decays are a product of two exponentials of the running sum, of which one overflows."""

    def _mixed(self, rate: Tensor, z: Tensor) -> Tensor:
        total = rate.cumsum(-1)[..., None]
        return (-total).exp() * (total.exp() * z).cumsum(1)


class _NoMaximum(CosineAttention):
    """The softmax divides exponentials as they are, without taking off the largest."""

    def _weights(self, scores: Tensor) -> Tensor:
        powers = scores.exp() * self._seen(scores.shape[-1])
        return powers / powers.sum(-1, keepdim=True)


class _HalfInside(Attention):
    """Weights and values are multiplied in bf16."""

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self._weights(self._scores(q, k))
        return (weights.bfloat16() @ v.bfloat16()).to(v)


class _ShortCast(Attention):
    """Scores go through fp16 on the way to the softmax."""

    def _weights(self, scores: Tensor) -> Tensor:
        return super()._weights(scores.half().to(scores))


class _SquareOfMean(NormalisedConvolution):
    """The variance is the mean square less the squared mean, of channels that share an offset."""

    def _normalised(self, z: Tensor) -> Tensor:
        z = z + 300
        mean = z.mean(1, keepdim=True)
        variance = z.square().mean(1, keepdim=True) - mean.square()
        return (z - mean) / (variance.clamp(min=0) + 1e-5).sqrt()


class _SlidingSum(LinearAttention):
    """A sum over the last four tokens is a difference of two running sums of positive numbers."""

    def _positive(self, z: Tensor) -> Tensor:
        return (4 * z).exp()

    def _summed(self, kv: Tensor) -> Tensor:
        return self._windowed(kv)

    def _total(self, k: Tensor) -> Tensor:
        return self._windowed(k)

    def _windowed(self, z: Tensor) -> Tensor:
        total = z.cumsum(2)
        return total - F.pad(total, (0, 0) * (z.ndim - 3) + (4, 0)).narrow(2, 0, z.shape[2])


class _BiasByPosition(Attention):
    """Scores gain the key's position, for less its distance: large numbers cancel."""

    def _turned(self, z: Tensor) -> Tensor:
        return z

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super()._scores(q, k) + torch.arange(k.shape[2]).to(q)


class _NoDenominator(LinearAttention):
    """The sum of positive features is not divided by anything."""

    def _total(self, k: Tensor) -> Tensor:
        return torch.ones_like(k)


class _Growing(Retention):
    """One head's decay is above one."""

    def __init__(self):
        super().__init__()
        self.decay = torch.tensor([0.5, 0.75, 0.9, 1.01])


class _RawPositions(Attention):
    """The position, as a number, is added to one channel."""

    def forward(self, x: Tensor) -> Tensor:
        ramp = 0.05 * torch.arange(x.shape[1]).to(x)
        return super().forward(x + F.pad(ramp[:, None], (0, D_MODEL - 1)))


class _NeverForgets(StateSpace):
    """The state hardly decays, and what enters it has a mean."""

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.full((HEADS,), -12.0))

    def _entered(self, x: Tensor) -> tuple[Tensor, ...]:
        z, gate, B, C, dt = super()._entered(x)
        return z + 1, gate, B + 1, C, dt


NUMERICS = (
    Fault("angles in the input's precision", "precision", _AnglesOfInput),
    Fault("decays from differences of a sum", "precision", _Differences),
    Fault("decays as two factors", "precision", _TwoFactors, ("stable",)),
    Fault("softmax without the largest taken off", "precision", _NoMaximum),
    Fault("bf16 inside", "precision", _HalfInside),
    Fault("fp16 scores", "precision", _ShortCast),
    Fault("variance as a difference", "precision", _SquareOfMean),
    Fault("sliding sum as a difference", "precision", _SlidingSum),
    Fault("bias by the key's position", "precision", _BiasByPosition),
    Fault("no denominator", "stable", _NoDenominator),
    Fault("one decay above one", "stable", _Growing),
    Fault("raw positions added", "stable", _RawPositions),
    Fault("never forgets", "stable", _NeverForgets),
)
