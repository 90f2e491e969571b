"""The right modules: counterparts of the faults, other mixers, and whole blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.planted import attention, cached, derivatives, models, routing, scanned, scans
from tests.planted.attention import D_MODEL, HEADS, RightAttention, compute_lags
from tests.planted.entry import Right
from tests.planted.routing import ProductKeys


class TorchAttention(nn.Module):
    """torch's multi-head attention with a causal mask."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
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
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, src_mask=mask, is_causal=True)


class RightGRU(nn.Module):
    """torch's GRU."""

    kind: type[nn.GRU] | type[nn.LSTM] = nn.GRU

    def __init__(self):
        super().__init__()
        self.layer = self.kind(D_MODEL, D_MODEL, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
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
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x)[:, None]


class RunningMaximum(nn.Module):
    """The running maximum of each channel of a linear map."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.enter(x).tanh().cummax(1).values


class LearnedPrefix(RightAttention):
    """Four learned tokens are put in front, and their outputs cut off."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, 4, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([self.prefix.expand(len(x), -1, -1), x], 1))[:, 4:]


class BagOfValues(ProductKeys):
    """Product keys whose values are summed by an embedding bag."""

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (2, -1))
        scores, index = torch.einsum("btid, ikd -> btik", query, self.keys).topk(3, dim=-1)
        pairs = self._index_value(index[..., 0, :], index[..., 1, :]).flatten(0, 1)
        weights = scores.sum(-2).sigmoid().flatten(0, 1)
        bag = F.embedding_bag(pairs, self.values, mode="sum", per_sample_weights=weights)
        return x + bag.view_as(x)


class _RightBlock(nn.Module):
    """Attention and an MLP, each after a norm, added to the residual stream."""

    def __init__(self):
        super().__init__()
        self.before_mixer, self.mixer = nn.RMSNorm(D_MODEL), RightAttention()
        self.before_map = nn.LayerNorm(D_MODEL)
        self.map = nn.Sequential(nn.Linear(D_MODEL, 32), nn.GELU(), nn.Linear(32, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._finish_branch(self.mixer(self.before_mixer(x)))
        return x + self._finish_branch(self.map(self.before_map(x)))

    def _finish_branch(self, y: Tensor) -> Tensor:
        return y


class _Dropout(_RightBlock):
    """Dropout of 0.1 on each branch."""

    def _finish_branch(self, y: Tensor) -> Tensor:
        return F.dropout(y, 0.1, self.training)


class _StochasticDepth(_RightBlock):
    """In training a row's branch is left out with probability 1/4."""

    def _finish_branch(self, y: Tensor) -> Tensor:
        if not self.training:
            return y
        return y * (torch.rand(len(y), 1, 1) < 0.75) / 0.75


class _LayerScale(_RightBlock):
    """Branches are scaled by learned numbers initialised to 10⁻⁶."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((D_MODEL,), 1e-6))

    def _finish_branch(self, y: Tensor) -> Tensor:
        return y * self.scale


class _ZeroGate(_RightBlock):
    """A norm's scale, shift and gate are linear maps initialised to zero."""

    def __init__(self):
        super().__init__()
        self.modulate = nn.Linear(D_MODEL, 3 * D_MODEL)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, gate = self.modulate(x).chunk(3, dim=-1)
        y = super().forward(self.before_mixer(x) * (1 + scale) + shift)
        return x + (1 + gate) * y


class _ZeroProjection(RightAttention):
    """The last layer of a branch is initialised to zero, which hides the layers before it."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class _Tied(_RightBlock):
    """The same block applied twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class _Checkpointed(_RightBlock):
    """Activations are recomputed in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y


class _NormInSingle(_RightBlock):
    """The norm is computed in fp32, whatever the input's precision."""

    def _finish_branch(self, y: Tensor) -> Tensor:
        return F.rms_norm(y.float(), (D_MODEL,)).to(y.dtype)


class _SingleOnly(nn.Module):
    """The input is cast to fp32, so weights in other precisions raise."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.float())[0]


class _Quantised(_RightBlock):
    """Each token is rounded to 8 bits of its own largest number, straight-through."""

    def _finish_branch(self, y: Tensor) -> Tensor:
        scale = y.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return y + ((y / scale).round() * scale - y).detach()


class _Frozen(_RightBlock):
    """One layer is frozen intentionally."""

    def __init__(self):
        super().__init__()
        self.mixer.out.requires_grad_(False)


class _Counted(_RightBlock):
    """Two integer buffers: a version, and an order of channels that is used."""

    order: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("version", torch.tensor(3))
        self.register_buffer("order", torch.randperm(D_MODEL))

    def _finish_branch(self, y: Tensor) -> Tensor:
        return y[..., self.order]


class _WithNorms(nn.Module):
    """Returns its output and each token's norm."""

    def __init__(self):
        super().__init__()
        self.block = _RightBlock()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.block(x)
        return y, y.norm(dim=-1)


class _ByEight(scans.Retention):
    """Takes only lengths that are multiples of eight."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % scans.CHUNK:
            raise ValueError(f"{x.shape[1]} tokens must be a multiple of {scans.CHUNK}")
        return super().forward(x)


class _WeightNorm(nn.Module):
    """A causal convolution whose filter is a direction times a size."""

    def __init__(self):
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(D_MODEL, D_MODEL, 3, dilation=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (4, 0))).mT


class _TinyLanguageModel(nn.Module):
    """A language model of 40 tokens with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, D_MODEL)
        self.block = _RightBlock()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens)) @ self.embed.weight.T


class _PaddedVocabulary(nn.Module):
    """Reads tokens; the row of the padding token never learns, as in torch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, D_MODEL, padding_idx=0)
        self.gru = nn.GRU(D_MODEL, D_MODEL, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gru(self.embed(tokens))[0]


def make_batch_norm() -> nn.Module:
    """Make a causal convolution after a batch norm in evaluation mode."""
    module = _Normed()
    return module.eval()


class _Normed(scans.NormalisedConvolution):
    """Normalised by running statistics; in training they would come from the batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(D_MODEL, momentum=0.0)
        self.norm.running_mean = torch.randn(D_MODEL) / 4
        self.norm.running_var = 0.5 + torch.rand(D_MODEL)

    def _normalise(self, z: Tensor) -> Tensor:
        norm = self.norm
        return F.batch_norm(z, norm.running_mean, norm.running_var, norm.weight, norm.bias)


class _KeyBias(RightAttention):
    """Keys have a bias and no positions: it shifts all scores of a query alike, and cancels."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(D_MODEL, D_MODEL)

    def _rotate(self, z: Tensor) -> Tensor:
        return z


class _Spectral(nn.Sequential):
    """A linear map of spectral norm one, whose estimate improves with each call in training."""

    def __init__(self):
        super().__init__(nn.utils.parametrizations.spectral_norm(nn.Linear(D_MODEL, D_MODEL)))


RIGHT: tuple[Right, ...] = (
    Right("attention", RightAttention),
    Right("cosine attention", attention.CosineAttention, "scores up to 100"),
    Right("capped attention", attention.CappedAttention),
    Right("smoothed scores", attention.SmoothedAttention),
    Right("sparse attention", attention.SparseAttention, "choices that rounding may flip"),
    Right("attention by log n", attention.LogAttention),
    Right("sliding window", attention.WindowAttention),
    Right("learned positions", attention.LearnedPositions, "at most 256 tokens"),
    Right("silent zeros", attention.SilentZeros, "vectors of zeros"),
    Right("attention with documents", attention.DocumentAttention, "seq_idx, attention_mask"),
    Right("time before batch", scans.TimeFirst, "reads [t b d], and does not say so"),
    Right("state beside a step", cached.StateBeside, "returns a pair, decodes"),
    Right("tokens", models.TokenModel, "tokens below 40"),
    Right("shown attention", attention.ShownAttention),
    Right("cached attention", cached.CachedAttention, "grouped, rotary, decodes"),
    Right("cached window", cached.WindowedCache, "decodes"),
    Right("least number as mask", cached.LeastMask, "decodes; padding gives NaN in fp64 alone"),
    Right("normed sum", cached.NormedSum, "forward keeps no state, step begins from None"),
    Right("linear attention", scans.LinearAttention),
    Right("retention", scans.Retention, "chunks of 8"),
    Right("forgetting", scans.Forgetting),
    Right("state space", scanned.StateSpace, "chunks of 8, decodes"),
    Right("convolution", scans.Convolution),
    Right("custom backward", derivatives.CustomBackward),
    Right("straight-through", derivatives.StraightThrough, "steps with a surrogate gradient"),
    Right("reversed gradient", derivatives.ReversedGradient, "by design"),
    Right("normalised convolution", scans.NormalisedConvolution),
    Right("long convolution", scans.LongConvolution, "rounding reaches ahead in a transform"),
    Right("experts", routing.RightExperts, "choices that rounding may flip"),
    Right("table", routing.Table, "steps, and rows that are rarely named"),
    Right("product keys", routing.ProductKeys),
    Right("embedding bag", BagOfValues),
    Right("torch attention", TorchAttention),
    Right("torch encoder layer", TorchLayer, "random in training"),
    Right("GRU", RightGRU),
    Right("LSTM", RightLSTM),
    Right("token shift", TokenShift),
    Right("selective scan", SelectiveScan, "token by token"),
    Right("complex scan", ComplexScan),
    Right("linear bias", LinearBias),
    Right("bias from the end", EndBias, "a bias by the length, which softmax cancels"),
    Right("buckets of distances", Buckets, "rows that only long sequences name"),
    Right("sinusoids", Sinusoids),
    Right("steep attention", Steep, "scores times 50"),
    Right("running mean", RunningMean, "no parameter"),
    Right("running maximum", RunningMaximum),
    Right("average", scans.Average, "a constant that fp32 rounds"),
    Right("slow average", scans.SlowAverage, "a constant that fp32 rounds, and bf16 loses"),
    Right("learned prefix", LearnedPrefix),
    Right("block", _RightBlock),
    Right("dropout", _Dropout, "random in training"),
    Right("stochastic depth", _StochasticDepth, "random in training"),
    Right("layer scale", _LayerScale, "branches of 10⁻⁶"),
    Right("zero gate", _ZeroGate, "zeros that learn"),
    Right("zero projection", _ZeroProjection, "gradients that are zero at first"),
    Right("tied blocks", _Tied),
    Right("checkpointed", _Checkpointed),
    Right("norm in fp32", _NormInSingle),
    Right("bias that softmax cancels", _KeyBias),
    Right("spectral norm", _Spectral, "changes in training"),
    Right("fp32 only", _SingleOnly, "refuses fp64"),
    Right("quantised tokens", _Quantised, "steps"),
    Right("frozen map", _Frozen, "parameters without gradient by intent"),
    Right("whole numbers as buffers", _Counted),
    Right("pair", _WithNorms, "returns a tuple"),
    Right("lengths by eight", _ByEight, "ValueError at other lengths"),
    Right("weight norm", _WeightNorm, "parametrised"),
    Right("language model", _TinyLanguageModel, "tokens below 40"),
    Right("padded vocabulary", _PaddedVocabulary, "tokens below 40; row 0 never learns"),
    Right("batch norm", make_batch_norm, "in evaluation; in training rows would rightly meet"),
    Right("packed documents", models.PackedModel, "tokens below 40; token 0 begins a document"),
    Right("smeared window", models.SmearedMixer, "decodes"),
)
"""Every right module."""
