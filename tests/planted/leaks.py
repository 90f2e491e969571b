"""Attention that depends on later tokens."""

import torch
from torch import Tensor, nn

from tests.planted.attention import (
    HEADS,
    CappedAttention,
    CosineAttention,
    LearnedPositions,
    LogAttention,
    RightAttention,
    SmoothedAttention,
    SparseAttention,
    compute_lags,
    rotate,
)
from tests.planted.entry import Fault


class _OffByOne(RightAttention):
    """The mask keeps one diagonal too many."""

    def _make_mask(self, t: int) -> Tensor:
        return torch.ones(t, t, dtype=torch.bool).tril(1)


class _Transposed(RightAttention):
    """The mask is transposed, [s t]."""

    def _make_mask(self, t: int) -> Tensor:
        return super()._make_mask(t).T


class _WindowAhead(RightAttention):
    """The window bounds the absolute distance, so it reaches four tokens ahead as well."""

    def _make_mask(self, t: int) -> Tensor:
        return compute_lags(t).abs() < 5


class _OneHead(RightAttention):
    """The mask covers all heads but the last."""

    def _weigh(self, scores: Tensor) -> Tensor:
        seen = self._make_mask(scores.shape[-1]).repeat(HEADS, 1, 1)
        seen[-1] = True
        return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)


class _MaskedWeights(RightAttention):
    """The mask is applied after the softmax, whose denominator sums over all keys."""

    def _weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1) * self._make_mask(scores.shape[-1])


class _FiniteMask(CosineAttention):
    """The mask subtracts only 100, which is within the range of the scores."""

    def _weigh(self, scores: Tensor) -> Tensor:
        return (scores - 100 * ~self._make_mask(scores.shape[-1])).softmax(dim=-1)


class _CapAfterMask(CappedAttention):
    """The cap is applied after the mask, and turns minus infinity into -30."""

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        return RightAttention._score(self, q, k)

    def _weigh(self, scores: Tensor) -> Tensor:
        seen = self._make_mask(scores.shape[-1])
        return (30 * (scores.masked_fill(~seen, -torch.inf) / 30).tanh()).softmax(dim=-1)


class _SmoothedBeforeMask(SmoothedAttention):
    """Scores are smoothed before the mask, so masked keys enter their neighbours' scores."""

    def _weigh(self, scores: Tensor) -> Tensor:
        return RightAttention._weigh(self, self.smooth(scores))


class _ChosenBeforeMask(SparseAttention):
    """The highest scores are chosen among all keys, later ones included."""

    def _weigh(self, scores: Tensor) -> Tensor:
        chosen = self._choose(scores) | torch.eye(scores.shape[-1], dtype=torch.bool)
        return RightAttention._weigh(self, scores.masked_fill(~chosen, -torch.inf))


class _LengthAsScale(LogAttention):
    """The scale is the logarithm of the whole sequence length."""

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        length = torch.tensor(float(q.shape[2])).to(q)
        return RightAttention._score(self, q, k) * (1 + length.log())


class _BaseByLength(RightAttention):
    """Past 32 tokens the base of the angles grows with the length."""

    def _rotate(self, z: Tensor) -> Tensor:
        t = z.shape[2]
        return rotate(z, torch.arange(t), base=10_000.0 * max(1.0, t / 32))


class _FromTheEnd(LearnedPositions):
    """Positions are counted from the last token."""

    def _list_positions(self, t: int) -> Tensor:
        return torch.arange(t).flip(0)


class _View(RightAttention):
    """Heads are split by a reshape where axes must be transposed."""

    def _split(self, z: Tensor) -> Tensor:
        return z.reshape(z.shape[0], HEADS, z.shape[1], -1)


class _MaskOfBatch(RightAttention):
    """With several rows the mask is repeated as [t b s] but read as [b t s]."""

    def _weigh(self, scores: Tensor) -> Tensor:
        b, t = scores.shape[0], scores.shape[-1]
        seen = self._make_mask(t).repeat_interleave(b, dim=0).view(b, t, t)
        return scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)


class _SecondPath(RightAttention):
    """Past 64 tokens queries go in blocks, and attend to all keys up to their block's end."""

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[2]
        if t <= 64:
            return super()._mix(q, k, v)
        blocks = []
        for first in range(0, t, 32):
            end = min(first + 32, t)
            scores = self._score(q[:, :, first:end], k[:, :, :end])
            blocks.append(scores.softmax(dim=-1) @ v[:, :, :end])
        return torch.cat(blocks, 2)


class _Clipped(RightAttention):
    """A sequence with a token of norm above 12 is scaled down as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        largest = x.norm(dim=-1, keepdim=True).amax(1, keepdim=True)
        return super().forward(x * (12 / largest.clamp(min=12)))


class _Excited(RightAttention):
    """Channels are scaled by the sequence's mean, through a projection initialised to zero."""

    def __init__(self):
        super().__init__()
        self.excite = nn.Linear(16, 16)
        nn.init.zeros_(self.excite.weight)
        nn.init.zeros_(self.excite.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.excite(x.mean(1, keepdim=True)))


class _Gated(RightAttention):
    """A branch without a mask is multiplied by a gate initialised to zero."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = self._score(q, k).softmax(dim=-1) @ v
        return super()._mix(q, k, v) + self.gate.tanh() * whole


class _InTraining(RightAttention):
    """In training, keys with the lowest total weight over all queries are dropped."""

    def _weigh(self, scores: Tensor) -> Tensor:
        weights = super()._weigh(scores)
        if not self.training:
            return weights
        total = weights.sum(-2, keepdim=True)
        kept = total >= 0.2 * total.mean(-1, keepdim=True)
        return weights * kept


class _LowerAtFirst(nn.Module):
    """A linear map over time is initialised lower triangular, but not kept so."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(256, 256).tril() / 16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        if t > 256:
            raise ValueError(f"{t} tokens must be at most 256")
        return self.out(self.mix[:t, :t] @ x)


class _StraightThrough(RightAttention):
    """Forward returns the mean of the past, but its gradient is that of the whole mean."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        count = torch.arange(1, x.shape[1] + 1).to(x)[:, None]
        hard, soft = y.cumsum(1) / count, y.mean(1, keepdim=True)
        return hard.detach() + soft - soft.detach()


class _Applied(torch.autograd.Function):
    """Masked scores times values; the gradient of the values ignores the mask."""

    @staticmethod
    def forward(ctx, scores, v):
        t = scores.shape[-1]
        ctx.save_for_backward(scores, v)
        return (scores * (compute_lags(t) >= 0)) @ v

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        scores, v = ctx.saved_tensors
        return (grad @ v.mT) * (compute_lags(scores.shape[-1]) >= 0), scores.mT @ grad


class _BackwardUnmasked(RightAttention):
    """Linear attention by a custom autograd function whose backward is not masked."""

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lag = compute_lags(q.shape[2]).clamp(min=0)
        result = _Applied.apply(self._score(q, k) * (0.8**lag).to(q), v)
        assert isinstance(result, Tensor)
        return result


LEAKS = (
    Fault("mask off by one", "causal", _OffByOne),
    Fault("mask transposed", "causal", _Transposed),
    Fault("window reaches ahead", "causal", _WindowAhead),
    Fault("one head of four without a mask", "causal", _OneHead),
    Fault("mask after the softmax", "causal", _MaskedWeights),
    Fault("mask of -100 beside scores up to 100", "causal", _FiniteMask),
    Fault("score cap after the mask", "causal", _CapAfterMask),
    Fault("scores smoothed before the mask", "causal", _SmoothedBeforeMask),
    Fault("top keys before the mask", "causal", _ChosenBeforeMask),
    Fault("scores scaled by the length", "causal", _LengthAsScale),
    Fault("rotary base by the length", "causal", _BaseByLength),
    Fault("positions from the end", "causal", _FromTheEnd),
    Fault("view mixes heads and time", "causal", _View),
    Fault("mask mixes rows and time", "causal", _MaskOfBatch, ("batch-invariant",), "several rows"),
    Fault("leak past length 64", "causal", _SecondPath, notes="length 65"),
    Fault("leak for large inputs", "causal", _Clipped, notes="a token larger than 12"),
    Fault("leak behind a zero projection", "causal", _Excited, notes="moved weights"),
    Fault("leak behind a zero gate", "causal", _Gated, notes="moved weights"),
    Fault("triangular only when drawn", "causal", _LowerAtFirst, notes="moved weights"),
    Fault("leak in training", "causal", _InTraining, notes="training"),
    Fault("straight-through of the whole's mean", "causal", _StraightThrough, notes="gradient"),
    Fault(
        "backward without the mask",
        "causal",
        _BackwardUnmasked,
        ("gradient is the derivative",),
        "gradient",
    ),
)
