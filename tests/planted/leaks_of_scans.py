"""Recurrences, convolutions, normalisations and routers that depend on later tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.attention import D_MODEL
from tests.planted.entry import Fault
from tests.planted.routing import RightExperts
from tests.planted.scans import (
    CHUNK,
    KERNEL,
    Convolution,
    LinearAttention,
    LongConvolution,
    NormalisedConvolution,
    Retention,
)


class _RolledCarry(Retention):
    """States are passed on by a roll, so the first chunk starts from the last one's state."""

    def _carry(self, added: Tensor, decay: Tensor) -> Tensor:
        before = super()._carry(added, decay)
        after = decay * before + added
        return after.roll(1, dims=2) if added.shape[2] > 1 else before


class _OwnCarry(Retention):
    """A chunk starts from the state after it."""

    def _carry(self, added: Tensor, decay: Tensor) -> Tensor:
        return decay * super()._carry(added, decay) + added


class _WrappedPadding(Retention):
    """Incomplete chunks are padded in front, with tokens from the end."""

    def _pad(self, z: Tensor, spare: int) -> Tensor:
        return (
            torch.cat([z[:, z.shape[1] - spare :], z], 1)
            if spare <= z.shape[1]
            else (F.pad(z, (0, 0, spare, 0)))
        )

    def _cut(self, y: Tensor, t: int) -> Tensor:
        return y[:, -t:]


class _WrongHalo(Convolution):
    """Chunks are convolved separately, each preceded by the first tokens of the next."""

    def _convolve(self, z: Tensor) -> Tensor:
        t = z.shape[-1]
        chunks = F.pad(z, (0, -t % CHUNK)).unflatten(-1, (-1, CHUNK))  # [b d c l]
        halo = chunks[..., : KERNEL - 1].roll(-1, dims=2).clone()
        halo[:, :, -1] = 0
        read = torch.cat([halo, chunks], -1).transpose(1, 2).flatten(0, 1)
        y = F.conv1d(read, self.filter, groups=D_MODEL)
        return y.unflatten(0, (len(z), -1)).transpose(1, 2).flatten(2)[..., :t]


class _OddLengths(Convolution):
    """An odd length is padded by one token at the end, but cut at the front."""

    def _convolve(self, z: Tensor) -> Tensor:
        t = z.shape[-1]
        return super()._convolve(F.pad(z, (0, t % 2)))[..., -t:]


class _Centred(Convolution):
    """The filter is centred on its token, as with padding "same"."""

    def _convolve(self, z: Tensor) -> Tensor:
        return F.conv1d(F.pad(z, (1, 2)), self.filter, groups=D_MODEL)


class _CutInFront(Convolution):
    """The input is padded on both sides, and the output cut at the front instead of the end."""

    def _convolve(self, z: Tensor) -> Tensor:
        y = F.conv1d(z, self.filter, padding=KERNEL - 1, groups=D_MODEL)
        return y[..., KERNEL - 1 :]


class _Circular(LongConvolution):
    """The transform is as long as the sequence, so the convolution is circular."""

    def _choose_period(self, t: int) -> int:
        return t


class _ShortPeriod(LongConvolution):
    """Past 64 tokens the transform has length 1.5 t, too short for the filter."""

    def _choose_period(self, t: int) -> int:
        return 2 * t if t <= 64 else t + t // 2


class _WholeDenominator(LinearAttention):
    """The denominator sums the features of all keys."""

    def _sum_keys(self, k: Tensor) -> Tensor:
        return k.sum(2, keepdim=True)


class _WholeMaximum(LinearAttention):
    """Features are exponentials relative to the sequence's maximum, plus 10⁻⁴."""

    def _make_positive(self, z: Tensor) -> Tensor:
        return (z - z.amax((2, 3), keepdim=True)).exp() + 1e-4


class _InstanceNorm(NormalisedConvolution):
    """Each channel is normalised over time."""

    def _normalise(self, z: Tensor) -> Tensor:
        return F.instance_norm(z) if z.shape[-1] > 1 else super()._normalise(z)


class _GlobalNorm(NormalisedConvolution):
    """One group norm spans channels and time."""

    def _normalise(self, z: Tensor) -> Tensor:
        return F.group_norm(z, 1)


class _SequenceScale(NormalisedConvolution):
    """The variance is taken over the whole sequence."""

    def _normalise(self, z: Tensor) -> Tensor:
        centred = z - z.mean(1, keepdim=True)
        return centred / (centred.square().mean((1, 2), keepdim=True) + 1e-5).sqrt()


class _Depths(RightExperts):
    """Only the half of the sequence with the highest router scores goes through the experts."""

    def _compute_gates(self, logits: Tensor) -> Tensor:
        worth = logits.logsumexp(-1)
        threshold = worth.topk(max(1, worth.shape[1] // 2), dim=1).values[:, -1:]
        return super()._compute_gates(logits) * (worth >= threshold)[..., None]


class _ExpertChooses(RightExperts):
    """One of the four experts chooses its tokens, half of the sequence."""

    def _choose(self, weights: Tensor) -> Tensor:
        chosen = super()._choose(weights)
        wanted = weights[..., 0]
        threshold = wanted.topk(-(-wanted.shape[1] // 2), dim=1).values[:, -1:]
        first = (wanted >= threshold)[..., None]
        return torch.cat([first, chosen[..., 1:]], -1)


class _BestFirst(RightExperts):
    """In training an expert over capacity drops its lowest-weighted tokens of the sequence."""

    def _compute_gates(self, logits: Tensor) -> Tensor:
        gates = super()._compute_gates(logits)
        if not self.training:
            return gates
        capacity = -(-gates.shape[1] * 2 // gates.shape[2])
        threshold = gates.topk(capacity, dim=1).values[:, -1:]
        return gates * (gates >= threshold)


class _BothWays(nn.Module):
    """A bidirectional GRU, half of which reads backwards."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


LEAKS_OF_SCANS = (
    Fault("carry rolls around", "causal", _RolledCarry, notes="length above 8"),
    Fault("chunk starts from its own end", "causal", _OwnCarry),
    Fault("padding to full chunks wraps", "causal", _WrappedPadding, notes="length 8n + 4 …"),
    Fault("leak across a chunk border", "causal", _WrongHalo, notes="length above 8"),
    Fault("leak at odd lengths", "causal", _OddLengths, notes="odd length"),
    Fault("convolution padded same", "causal", _Centred),
    Fault("convolution cut in front", "causal", _CutInFront),
    Fault("circular convolution", "causal", _Circular),
    Fault("transform too short past 64", "causal", _ShortPeriod, notes="length above 64"),
    Fault("denominator of all keys", "causal", _WholeDenominator),
    Fault("maximum of all keys", "causal", _WholeMaximum),
    Fault("instance norm over time", "causal", _InstanceNorm),
    Fault("group norm over channels and time", "causal", _GlobalNorm),
    Fault("spread over the sequence", "causal", _SequenceScale),
    Fault("mixture of depths", "causal", _Depths),
    Fault("one expert chooses its tokens", "causal", _ExpertChooses),
    Fault("capacity by priority in training", "causal", _BestFirst, notes="training"),
    Fault("recurrence reads both ways", "causal", _BothWays),
)
