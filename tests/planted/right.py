"""The right modules: counterparts of the faults, other mixers, and whole blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.planted import (
    attention,
    cached,
    derivatives,
    rare,
    routing,
    scanned,
    scans,
    stepped,
)
from tests.planted import right_mixers as mixers
from tests.planted.attention import D_MODEL, RightAttention
from tests.planted.entry import Right
from tests.planted.forms import ShownAttention
from tests.planted.packed import PACKED_RIGHT


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
    Right("silent zeros", rare.SilentZeros, "vectors of zeros"),
    Right("tokens", rare.TokenModel, "tokens below 40"),
    Right("shown attention", ShownAttention),
    Right("cached attention", cached.CachedAttention, "grouped, rotary, decodes"),
    Right("cached window", cached.WindowedCache, "decodes"),
    Right("least number as mask", cached.LeastMask, "decodes; padding gives NaN in fp64 alone"),
    Right("normed sum", stepped.NormedSum, "forward keeps no state, step begins from None"),
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
    Right("embedding bag", mixers.BagOfValues),
    Right("torch attention", mixers.TorchAttention),
    Right("torch encoder layer", mixers.TorchLayer, "random in training"),
    Right("GRU", mixers.RightGRU),
    Right("LSTM", mixers.RightLSTM),
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
    *PACKED_RIGHT,
)
"""Every right module."""
