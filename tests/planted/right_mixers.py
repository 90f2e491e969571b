"""Right mixers of further kinds, without a faulty counterpart."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.attention import D_MODEL, HEADS, RightAttention, compute_lags
from tests.planted.routing import ProductKeys


class TorchAttention(nn.Module):
    """torch's multi-head attention with a causal mask."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]


class TorchLayer(nn.Module):
    """torch's encoder layer, causal, with dropout in training."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            D_MODEL, HEADS, 32, 0.1, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, src_mask=mask, is_causal=True)


class RightGRU(nn.Module):
    """torch's GRU."""

    kind: type[nn.GRU] | type[nn.LSTM] = nn.GRU

    def __init__(self):
        super().__init__()
        self.layer = self.kind(D_MODEL, D_MODEL, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        return self.layer(x)[0]


class RightLSTM(RightGRU):
    """torch's LSTM."""

    kind = nn.LSTM


class TokenShift(nn.Module):
    """Tokens are mixed with the one before; a decaying sum is weighted by exponentials of keys."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, D_MODEL))
        self.maps = nn.Parameter(torch.randn(3, D_MODEL, D_MODEL) / D_MODEL**0.5)
        self.decay = nn.Parameter(torch.linspace(-3, 1, D_MODEL))
        self.bonus = nn.Parameter(torch.zeros(D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        r, k, v = (
            (before + share * (x - before)) @ map
            for share, map in zip(self.mix, self.maps, strict=True)
        )
        lag = compute_lags(x.shape[1])[..., None]
        past = -(lag - 1).clamp(min=0) * self.decay.exp()
        weights = past.masked_fill(lag <= 0, -torch.inf).where(lag != 0, self.bonus)
        return r.sigmoid() * ((weights + k[:, None]).softmax(2) * v[:, None]).sum(2)


class SelectiveScan(nn.Module):
    """A scan with four states per channel whose rates, inputs and outputs depend on the token."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Linear(D_MODEL, D_MODEL)
        self.maps = nn.Linear(D_MODEL, 8)
        self.A_log = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(D_MODEL, 1))
        self.D = nn.Parameter(torch.ones(D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        rate, (B, C) = F.softplus(self.rate(x)), self.maps(x).chunk(2, dim=-1)
        decay = (rate[..., None] * -self.A_log.exp()).exp()
        added = (rate * x)[..., None] * B[:, :, None]
        state, states = torch.zeros_like(added[:, 0]), []
        for one, new in zip(decay.unbind(1), added.unbind(1), strict=True):
            state = one * state + new
            states.append(state)
        return (torch.stack(states, 1) * C[:, :, None]).sum(-1) + self.D * x


class ComplexScan(nn.Module):
    """A diagonal recurrence with complex poles, computed by their powers in fp32 or more."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(-3, 0, D_MODEL))
        self.angle = nn.Parameter(torch.rand(D_MODEL) * 3)
        self.read = nn.Parameter(torch.randn(D_MODEL, 2))
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        high = torch.promote_types(x.dtype, torch.float32)
        lag = compute_lags(x.shape[1]).clamp(min=0).to(high)[..., None]
        power = torch.polar((-lag * self.rate.to(high).exp()).exp(), lag * self.angle.to(high))
        kernel = (power * torch.view_as_complex(self.read.to(high))).real
        kernel = kernel * (compute_lags(x.shape[1]) >= 0)[..., None]
        return self.out(torch.einsum("tsd, bsd -> btd", kernel, x.to(high)).to(x.dtype))


class LinearBias(RightAttention):
    """Scores fall linearly with the distance, with a slope per head (ALiBi)."""

    def _rotate(self, z: Tensor) -> Tensor:
        return z

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        return super()._score(q, k) - (slopes[:, None, None] * compute_lags(q.shape[2])).to(q)


class EndBias(RightAttention):
    """A number that depends on the length is added to all scores, and cancels in the softmax."""

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        return super()._score(q, k) + q.shape[2] / 64


class Buckets(RightAttention):
    """A learned bias per distance bucket: 8 exact ones, and 8 that widen up to 128."""

    def __init__(self):
        super().__init__()
        self.distance = nn.Embedding(16, HEADS)

    def _rotate(self, z: Tensor) -> Tensor:
        return z

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        lag = compute_lags(q.shape[2]).clamp(min=0)
        wide = 8 + ((lag.clamp(min=1) / 8).log2() * 2).long()
        bucket = lag.where(lag < 8, wide.clamp(max=15))
        return super()._score(q, k) + self.distance(bucket).movedim(-1, 0)


class Sinusoids(RightAttention):
    """Adds the sines and cosines of absolute positions."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        rates = 1e-4 ** (torch.arange(8) / 8)
        angles = torch.arange(x.shape[1])[:, None] * rates
        return super().forward(x + torch.cat([angles.sin(), angles.cos()], -1).to(x))


class Steep(RightAttention):
    """Scores are 50 times as large, so rounding moves the output far although nothing leaks."""

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        return 50 * super()._score(q, k)


class RunningMean(nn.Module):
    """The mean of all tokens so far; has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x)[:, None]


class RunningMaximum(nn.Module):
    """The running maximum of each channel of a linear map."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        return self.enter(x).tanh().cummax(1).values


class LearnedPrefix(RightAttention):
    """Four learned tokens are put in front, and their outputs cut off."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, 4, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        return super().forward(torch.cat([self.prefix.expand(len(x), -1, -1), x], 1))[:, 4:]


class BagOfValues(ProductKeys):
    """Product keys whose values are summed by an embedding bag."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        query = self.query(x).unflatten(-1, (2, -1))
        scores, index = torch.einsum("btid, ikd -> btik", query, self.keys).topk(3, dim=-1)
        pairs = self._index_value(index[..., 0, :], index[..., 1, :]).flatten(0, 1)
        weights = scores.sum(-2).sigmoid().flatten(0, 1)
        bag = F.embedding_bag(pairs, self.values, mode="sum", per_sample_weights=weights)
        return x + bag.view_as(x)
