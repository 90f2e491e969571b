"""Mixers that depend on later tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.attention import (
    D_MODEL,
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
from tests.planted.entry import Row, plant
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


class _BothWays(nn.Module):
    """A bidirectional GRU, half of which reads backwards."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


def _one_head(self, scores):
    seen = self._make_mask(scores.shape[-1]).repeat(HEADS, 1, 1)
    seen[-1] = True
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)


def _cap_after_mask(self, scores):
    seen = self._make_mask(scores.shape[-1])
    return (30 * (scores.masked_fill(~seen, -torch.inf) / 30).tanh()).softmax(dim=-1)


def _chosen_before_mask(self, scores):
    chosen = self._choose(scores) | torch.eye(scores.shape[-1], dtype=torch.bool)
    return RightAttention._weigh(self, scores.masked_fill(~chosen, -torch.inf))


def _length_as_scale(self, q, k):
    length = torch.tensor(float(q.shape[2])).to(q)
    return RightAttention._score(self, q, k) * (1 + length.log())


def _base_by_length(self, z):
    t = z.shape[2]
    return rotate(z, torch.arange(t), base=10000.0 * max(1.0, t / 32))


def _mask_of_batch(self, scores):
    b, t = (scores.shape[0], scores.shape[-1])
    seen = self._make_mask(t).repeat_interleave(b, dim=0).view(b, t, t)
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)


def _second_path(self, q, k, v):
    t = q.shape[2]
    if t <= 64:
        return RightAttention._mix(self, q, k, v)
    blocks = []
    for first in range(0, t, 32):
        end = min(first + 32, t)
        scores = self._score(q[:, :, first:end], k[:, :, :end])
        blocks.append(scores.softmax(dim=-1) @ v[:, :, :end])
    return torch.cat(blocks, 2)


def _clipped(self, x):
    largest = x.norm(dim=-1, keepdim=True).amax(1, keepdim=True)
    return RightAttention.forward(self, x * (12 / largest.clamp(min=12)))


def _build_zero_map():
    made = nn.Linear(16, 16)
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    return made


def _gated(self, q, k, v):
    whole = self._score(q, k).softmax(dim=-1) @ v
    return RightAttention._mix(self, q, k, v) + self.gate.tanh() * whole


def _in_training(self, scores):
    weights = RightAttention._weigh(self, scores)
    if not self.training:
        return weights
    total = weights.sum(-2, keepdim=True)
    kept = total >= 0.2 * total.mean(-1, keepdim=True)
    return weights * kept


def _straight_through(self, x):
    y = RightAttention.forward(self, x)
    count = torch.arange(1, x.shape[1] + 1).to(x)[:, None]
    hard, soft = (y.cumsum(1) / count, y.mean(1, keepdim=True))
    return hard.detach() + soft - soft.detach()


def _backward_unmasked(self, q, k, v):
    lag = compute_lags(q.shape[2]).clamp(min=0)
    result = _Applied.apply(self._score(q, k) * (0.8**lag).to(q), v)
    assert isinstance(result, Tensor)
    return result


def _rolled_carry(self, added, decay):
    before = Retention._carry(self, added, decay)
    after = decay * before + added
    return after.roll(1, dims=2) if added.shape[2] > 1 else before


def _wrong_halo(self, z):
    t = z.shape[-1]
    chunks = F.pad(z, (0, -t % CHUNK)).unflatten(-1, (-1, CHUNK))
    halo = chunks[..., : KERNEL - 1].roll(-1, dims=2).clone()
    halo[:, :, -1] = 0
    read = torch.cat([halo, chunks], -1).transpose(1, 2).flatten(0, 1)
    y = F.conv1d(read, self.filter, groups=D_MODEL)
    return y.unflatten(0, (len(z), -1)).transpose(1, 2).flatten(2)[..., :t]


def _odd_lengths(self, z):
    t = z.shape[-1]
    return Convolution._convolve(self, F.pad(z, (0, t % 2)))[..., -t:]


def _cut_in_front(self, z):
    y = F.conv1d(z, self.filter, padding=KERNEL - 1, groups=D_MODEL)
    return y[..., KERNEL - 1 :]


def _sequence_scale(self, z):
    centred = z - z.mean(1, keepdim=True)
    return centred / (centred.square().mean((1, 2), keepdim=True) + 1e-05).sqrt()


def _depths(self, logits):
    worth = logits.logsumexp(-1)
    threshold = worth.topk(max(1, worth.shape[1] // 2), dim=1).values[:, -1:]
    return RightExperts._compute_gates(self, logits) * (worth >= threshold)[..., None]


def _expert_chooses(self, weights):
    chosen = RightExperts._choose(self, weights)
    wanted = weights[..., 0]
    threshold = wanted.topk(-(-wanted.shape[1] // 2), dim=1).values[:, -1:]
    first = (wanted >= threshold)[..., None]
    return torch.cat([first, chosen[..., 1:]], -1)


def _best_first(self, logits):
    gates = RightExperts._compute_gates(self, logits)
    if not self.training:
        return gates
    capacity = -(-gates.shape[1] * 2 // gates.shape[2])
    threshold = gates.topk(capacity, dim=1).values[:, -1:]
    return gates * (gates >= threshold)


LEAKS = (
    *plant(
        "causal",
        Row(
            "mask off by one",
            RightAttention,
            _make_mask=lambda self, t: torch.ones(t, t, dtype=torch.bool).tril(1),
        ),
        Row(
            "mask transposed",
            RightAttention,
            _make_mask=lambda self, t: RightAttention._make_mask(self, t).T,
        ),
        Row(
            "window reaches ahead",
            RightAttention,
            _make_mask=lambda self, t: compute_lags(t).abs() < 5,
        ),
        Row("one head of four without a mask", RightAttention, _weigh=_one_head),
        Row(
            "mask after the softmax",
            RightAttention,
            _weigh=lambda self, scores: scores.softmax(dim=-1) * self._make_mask(scores.shape[-1]),
        ),
        Row(
            "mask of -100 beside scores up to 100",
            CosineAttention,
            _weigh=lambda self, scores: (scores - 100 * ~self._make_mask(scores.shape[-1])).softmax(
                dim=-1
            ),
        ),
        Row(
            "score cap after the mask",
            CappedAttention,
            _score=lambda self, q, k: RightAttention._score(self, q, k),
            _weigh=_cap_after_mask,
        ),
        Row(
            "scores smoothed before the mask",
            SmoothedAttention,
            _weigh=lambda self, scores: RightAttention._weigh(self, self.smooth(scores)),
        ),
        Row("top keys before the mask", SparseAttention, _weigh=_chosen_before_mask),
        Row("scores scaled by the length", LogAttention, _score=_length_as_scale),
        Row("rotary base by the length", RightAttention, _rotate=_base_by_length),
        Row(
            "positions from the end",
            LearnedPositions,
            _list_positions=lambda self, t: torch.arange(t).flip(0),
        ),
        Row(
            "view mixes heads and time",
            RightAttention,
            _split=lambda self, z: z.reshape(z.shape[0], HEADS, z.shape[1], -1),
        ),
        Row(
            "mask mixes rows and time",
            RightAttention,
            also=("batch-invariant",),
            notes="several rows",
            _weigh=_mask_of_batch,
        ),
        Row("leak past length 64", RightAttention, notes="length 65", _mix=_second_path),
        Row(
            "leak for large inputs",
            RightAttention,
            notes="a token larger than 12",
            forward=_clipped,
        ),
        Row(
            "leak behind a zero projection",
            RightAttention,
            notes="moved weights",
            adds={"excite": _build_zero_map},
            forward=lambda self, x: (
                RightAttention.forward(self, x) * (1 + self.excite(x.mean(1, keepdim=True)))
            ),
        ),
        Row(
            "leak behind a zero gate",
            RightAttention,
            notes="moved weights",
            adds={"gate": lambda: nn.Parameter(torch.zeros(()))},
            _mix=_gated,
        ),
        Row("triangular only when drawn", _LowerAtFirst, notes="moved weights"),
        Row("leak in training", RightAttention, notes="training", _weigh=_in_training),
        Row(
            "straight-through of the whole's mean",
            RightAttention,
            notes="gradient",
            forward=_straight_through,
        ),
        Row(
            "backward without the mask",
            RightAttention,
            also=("gradient is the derivative",),
            notes="gradient",
            _mix=_backward_unmasked,
        ),
        Row("carry rolls around", Retention, notes="length above 8", _carry=_rolled_carry),
        Row(
            "chunk starts from its own end",
            Retention,
            _carry=lambda self, added, decay: decay * Retention._carry(self, added, decay) + added,
        ),
        Row(
            "padding to full chunks wraps",
            Retention,
            notes="length 8n + 4 …",
            _pad=lambda self, z, spare: (
                torch.cat([z[:, z.shape[1] - spare :], z], 1)
                if spare <= z.shape[1]
                else F.pad(z, (0, 0, spare, 0))
            ),
            _cut=lambda self, y, t: y[:, -t:],
        ),
        Row(
            "leak across a chunk border", Convolution, notes="length above 8", _convolve=_wrong_halo
        ),
        Row("leak at odd lengths", Convolution, notes="odd length", _convolve=_odd_lengths),
        Row(
            "convolution padded same",
            Convolution,
            _convolve=lambda self, z: F.conv1d(F.pad(z, (1, 2)), self.filter, groups=D_MODEL),
        ),
        Row("convolution cut in front", Convolution, _convolve=_cut_in_front),
        Row("circular convolution", LongConvolution, _choose_period=lambda self, t: t),
        Row(
            "transform too short past 64",
            LongConvolution,
            notes="length above 64",
            _choose_period=lambda self, t: 2 * t if t <= 64 else t + t // 2,
        ),
        Row(
            "denominator of all keys",
            LinearAttention,
            _sum_keys=lambda self, k: k.sum(2, keepdim=True),
        ),
        Row(
            "maximum of all keys",
            LinearAttention,
            _make_positive=lambda self, z: (z - z.amax((2, 3), keepdim=True)).exp() + 0.0001,
        ),
        Row(
            "instance norm over time",
            NormalisedConvolution,
            _normalise=lambda self, z: (
                F.instance_norm(z) if z.shape[-1] > 1 else NormalisedConvolution._normalise(self, z)
            ),
        ),
        Row(
            "group norm over channels and time",
            NormalisedConvolution,
            _normalise=lambda self, z: F.group_norm(z, 1),
        ),
        Row("spread over the sequence", NormalisedConvolution, _normalise=_sequence_scale),
        Row("mixture of depths", RightExperts, _compute_gates=_depths),
        Row("one expert chooses its tokens", RightExperts, _choose=_expert_chooses),
        Row(
            "capacity by priority in training",
            RightExperts,
            notes="training",
            _compute_gates=_best_first,
        ),
        Row("recurrence reads both ways", _BothWays),
    ),
)
