"""Mixers that lose precision, or whose output or state is unbounded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.attention import (
    D_MODEL,
    HEADS,
    CosineAttention,
    RightAttention,
    compute_lags,
)
from tests.planted.entry import Fault
from tests.planted.scanned import StateSpace
from tests.planted.scans import (
    Forgetting,
    LinearAttention,
    NormalisedConvolution,
    Retention,
)


class _AnglesOfInput(CosineAttention):
    """Positions and angles are in the input's own precision."""

    def _rotate(self, z: Tensor) -> Tensor:
        angles = torch.arange(z.shape[2]).to(z)[:, None] * torch.tensor([0.9, 0.03]).to(z)
        z1, z2 = z.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([z1 * cos - z2 * sin, z2 * cos + z1 * sin], dim=-1)


class _Differences(Forgetting):
    """Decays are exponentials of differences of one running sum."""

    def _mix(self, rate: Tensor, z: Tensor) -> Tensor:
        total = rate.cumsum(-1)
        decay = (total[:, None, :] - total[:, :, None]).masked_fill(
            compute_lags(rate.shape[1]) < 0, -torch.inf
        )
        return decay.exp() @ z


class _TwoFactors(Forgetting):
    """Decays are a product of two exponentials of the running sum, one of which overflows."""

    def _mix(self, rate: Tensor, z: Tensor) -> Tensor:
        total = rate.cumsum(-1)[..., None]
        return (-total).exp() * (total.exp() * z).cumsum(1)


class _NoMaximum(CosineAttention):
    """The softmax does not subtract the maximum before the exponential."""

    def _weigh(self, scores: Tensor) -> Tensor:
        powers = scores.exp() * self._make_mask(scores.shape[-1])
        return powers / powers.sum(-1, keepdim=True)


class _HalfInside(RightAttention):
    """Weights and values are multiplied in bf16."""

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self._weigh(self._score(q, k))
        return (weights.bfloat16() @ v.bfloat16()).to(v)


class _ShortCast(RightAttention):
    """Scores are cast to fp16 before the softmax."""

    def _weigh(self, scores: Tensor) -> Tensor:
        return super()._weigh(scores.half().to(scores))


class _SquareOfMean(NormalisedConvolution):
    """The variance is the mean square minus the squared mean, of channels with a common offset."""

    def _normalise(self, z: Tensor) -> Tensor:
        z = z + 300
        mean = z.mean(1, keepdim=True)
        variance = z.square().mean(1, keepdim=True) - mean.square()
        return (z - mean) / (variance.clamp(min=0) + 1e-5).sqrt()


class _SlidingSum(LinearAttention):
    """A sum over the last four tokens is a difference of two running sums of positive numbers."""

    def _make_positive(self, z: Tensor) -> Tensor:
        return (4 * z).exp()

    def _sum_products(self, kv: Tensor) -> Tensor:
        return self._sum_window(kv)

    def _sum_keys(self, k: Tensor) -> Tensor:
        return self._sum_window(k)

    def _sum_window(self, z: Tensor) -> Tensor:
        total = z.cumsum(2)
        return total - F.pad(total, (0, 0) * (z.ndim - 3) + (4, 0)).narrow(2, 0, z.shape[2])


class _BiasByPosition(RightAttention):
    """The key's position, not minus its distance, is added to scores: large numbers cancel."""

    def _rotate(self, z: Tensor) -> Tensor:
        return z

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        return super()._score(q, k) + torch.arange(k.shape[2]).to(q)


class _NoDenominator(LinearAttention):
    """The sum of positive features is not normalised."""

    def _sum_keys(self, k: Tensor) -> Tensor:
        return torch.ones_like(k)


class _Growing(Retention):
    """One head's decay is above one."""

    def __init__(self):
        super().__init__()
        self.decay = torch.tensor([0.5, 0.75, 0.9, 1.01])


class _RawPositions(RightAttention):
    """The position, as a number, is added to one channel."""

    def forward(self, x: Tensor) -> Tensor:
        ramp = 0.05 * torch.arange(x.shape[1]).to(x)
        return super().forward(x + F.pad(ramp[:, None], (0, D_MODEL - 1)))


class _NeverForgets(StateSpace):
    """The state hardly decays, and its input has a nonzero mean."""

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.full((HEADS,), -12.0))

    def _project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        z, gate, B, C, dt = super()._project_in(x)
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
