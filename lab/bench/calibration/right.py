"""The right modules: the twins of the faults, other mixers, and what stands around mixers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lab.bench.calibration import attention, cached, routing, scanned, scans
from lab.bench.calibration import right_mixers as mixers
from lab.bench.calibration.attention import D_MODEL, Attention
from lab.bench.calibration.entry import Right
from lab.bench.calibration.forms import ShownAttention


class _Block(nn.Module):
    """Attention and a map of each token, both after a norm, added to the stream."""

    def __init__(self):
        super().__init__()
        self.before_mixer, self.mixer = nn.RMSNorm(D_MODEL), Attention()
        self.before_map = nn.LayerNorm(D_MODEL)
        self.map = nn.Sequential(nn.Linear(D_MODEL, 32), nn.GELU(), nn.Linear(32, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._kept(self.mixer(self.before_mixer(x)))
        return x + self._kept(self.map(self.before_map(x)))

    def _kept(self, y: Tensor) -> Tensor:
        return y


class _Dropout(_Block):
    """A tenth of each branch is dropped in training."""

    def _kept(self, y: Tensor) -> Tensor:
        return F.dropout(y, 0.1, self.training)


class _StochasticDepth(_Block):
    """In training a row's branch is left out, one time in four."""

    def _kept(self, y: Tensor) -> Tensor:
        if not self.training:
            return y
        return y * (torch.rand(len(y), 1, 1) < 0.75) / 0.75


class _LayerScale(_Block):
    """Branches are scaled by learned numbers that begin at 10⁻⁶."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((D_MODEL,), 1e-6))

    def _kept(self, y: Tensor) -> Tensor:
        return y * self.scale


class _ZeroGate(_Block):
    """A norm's scale, shift and gate are maps of each token that begin at zero."""

    def __init__(self):
        super().__init__()
        self.modulate = nn.Linear(D_MODEL, 3 * D_MODEL)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, gate = self.modulate(x).chunk(3, dim=-1)
        y = super().forward(self.before_mixer(x) * (1 + scale) + shift)
        return x + (1 + gate) * y


class _ZeroProjection(Attention):
    """The last map of a branch begins at zero, and so hides what is before it at first."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class _Tied(_Block):
    """The same block, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class _Checkpointed(_Block):
    """Activations are computed anew in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y


class _NormInSingle(_Block):
    """The norm is computed in fp32, whatever comes in."""

    def _kept(self, y: Tensor) -> Tensor:
        return F.rms_norm(y.float(), (D_MODEL,)).to(y.dtype)


class _SingleOnly(nn.Module):
    """What comes in is cast to fp32, so other weights are refused."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.float())[0]


class _Quantised(_Block):
    """Each token is rounded to 8 bits of its own largest number, straight through."""

    def _kept(self, y: Tensor) -> Tensor:
        scale = y.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return y + ((y / scale).round() * scale - y).detach()


class _Frozen(_Block):
    """One map does not learn, by intent."""

    def __init__(self):
        super().__init__()
        self.mixer.out.requires_grad_(False)


class _Counted(_Block):
    """Buffers hold whole numbers: a version, and an order of channels that is used."""

    order: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("version", torch.tensor(3))
        self.register_buffer("order", torch.randperm(D_MODEL))

    def _kept(self, y: Tensor) -> Tensor:
        return y[..., self.order]


class _Pair(nn.Module):
    """Returns its output and each token's norm beside it."""

    def __init__(self):
        super().__init__()
        self.block = _Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.block(x)
        return y, y.norm(dim=-1)


class _ByEight(scans.Retention):
    """Takes only lengths that fill chunks of eight."""

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


class _LanguageModel(nn.Module):
    """Tokens in, a block, scores of 40 tokens out by the table that they came in by."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, D_MODEL)
        self.block = _Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens)) @ self.embed.weight.T


class _PaddedVocabulary(nn.Module):
    """Tokens in; the row of the padding token never learns, as torch has it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, D_MODEL, padding_idx=0)
        self.gru = nn.GRU(D_MODEL, D_MODEL, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gru(self.embed(tokens))[0]


def _batch_norm() -> nn.Module:
    """Return a causal convolution behind a norm by statistics that are fixed, in evaluation."""
    module = _Normed()
    return module.eval()


class _Normed(scans.NormalisedConvolution):
    """Normalised by running statistics, which training would take from the batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(D_MODEL, momentum=0.0)
        self.norm.running_mean = torch.randn(D_MODEL) / 4
        self.norm.running_var = 0.5 + torch.rand(D_MODEL)

    def _normalised(self, z: Tensor) -> Tensor:
        norm = self.norm
        return F.batch_norm(z, norm.running_mean, norm.running_var, norm.weight, norm.bias)


class _KeyBias(Attention):
    """Keys have a bias and no positions: it moves all scores of a query alike, and cancels."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(D_MODEL, D_MODEL)

    def _turned(self, z: Tensor) -> Tensor:
        return z


class _Spectral(nn.Sequential):
    """A map of norm one, whose estimate every call in training improves."""

    def __init__(self):
        super().__init__(nn.utils.parametrizations.spectral_norm(nn.Linear(D_MODEL, D_MODEL)))


RIGHT: tuple[Right, ...] = (
    Right("attention", Attention),
    Right("cosine attention", attention.CosineAttention, "scores up to 100"),
    Right("capped attention", attention.CappedAttention),
    Right("smoothed scores", attention.SmoothedAttention),
    Right("sparse attention", attention.SparseAttention, "choices that rounding may flip"),
    Right("attention by log n", attention.LogAttention),
    Right("sliding window", attention.WindowAttention),
    Right("learned positions", attention.LearnedPositions, "at most 256 tokens"),
    Right("shown attention", ShownAttention),
    Right("cached attention", cached.CachedAttention, "grouped, rotary, decodes"),
    Right("cached window", cached.WindowedCache, "decodes"),
    Right("linear attention", scans.LinearAttention),
    Right("retention", scans.Retention, "chunks of 8"),
    Right("forgetting", scans.Forgetting),
    Right("state space", scanned.StateSpace, "chunks of 8, decodes"),
    Right("convolution", scans.Convolution),
    Right("normalised convolution", scans.NormalisedConvolution),
    Right("long convolution", scans.LongConvolution, "rounding reaches ahead in a transform"),
    Right("experts", routing.Experts, "choices that rounding may flip"),
    Right("table", routing.Table, "steps, and rows that are rarely named"),
    Right("product keys", routing.ProductKeys),
    Right("embedding bag", mixers.BagOfValues),
    Right("torch attention", mixers.TorchAttention),
    Right("torch encoder layer", mixers.TorchLayer, "random in training"),
    Right("GRU", mixers.Recurrent),
    Right("LSTM", mixers.LongShort),
    Right("token shift", mixers.TokenShift),
    Right("selective scan", mixers.SelectiveScan, "token by token"),
    Right("complex scan", mixers.ComplexScan),
    Right("linear bias", mixers.LinearBias),
    Right("bias from the end", mixers.EndBias, "a bias by the length, which softmax cancels"),
    Right("buckets of distances", mixers.Buckets, "rows that only long sequences name"),
    Right("sinusoids", mixers.Sinusoids),
    Right("steep attention", mixers.Steep, "scores times 50"),
    Right("running mean", mixers.RunningMean, "no parameter"),
    Right("running maximum", mixers.RunningMaximum),
    Right("learned prefix", mixers.LearnedPrefix),
    Right("block", _Block),
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
    Right("pair", _Pair, "returns a tuple"),
    Right("lengths by eight", _ByEight, "ValueError at other lengths"),
    Right("weight norm", _WeightNorm, "parametrised"),
    Right("language model", _LanguageModel, "tokens below 40"),
    Right("padded vocabulary", _PaddedVocabulary, "tokens below 40; row 0 never learns"),
    Right("batch norm", _batch_norm, "in evaluation; in training rows would rightly meet"),
)
"""Every right module."""
