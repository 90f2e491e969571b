"""Right recurrences and convolutions, in pieces of which a fault replaces one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.bench.calibration.attention import D_MODEL, HEADS, behind, merge, split

CHUNK = 8
KERNEL = 4


class LinearAttention(nn.Module):
    """Attention by positive features, without a softmax; both sums run along the sequence."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        q, k, v = (split(z, HEADS) for z in self.qkv(x).chunk(3, dim=-1))
        q, k = self._positive(q), self._positive(k)
        above = torch.einsum("bhtp, bhtpr -> bhtr", q, self._summed(k[..., None] * v[..., None, :]))
        below = (q * self._total(k)).sum(-1, keepdim=True)
        return self.out(merge(above / below))

    def _positive(self, z: Tensor) -> Tensor:
        return F.elu(z) + 1

    def _summed(self, kv: Tensor) -> Tensor:
        return kv.cumsum(2)

    def _total(self, k: Tensor) -> Tensor:
        return k.cumsum(2)


class Retention(nn.Module):
    """Linear attention with a fixed decay a head, in chunks of 8 with a carry between them."""

    decay: Tensor

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL)
        self.out = nn.Linear(D_MODEL, D_MODEL)
        self.register_buffer("decay", torch.tensor([0.5, 0.75, 0.9, 0.97]))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        t = x.shape[1]
        y = self._chunked(self._padded(self.qkv(x), -t % CHUNK))
        return self.out(self._cut(y, t))

    def _padded(self, z: Tensor, spare: int) -> Tensor:
        return F.pad(z, (0, 0, 0, spare))

    def _cut(self, y: Tensor, t: int) -> Tensor:
        return y[:, :t]

    def _chunked(self, qkv: Tensor) -> Tensor:
        q, k, v = (
            split(z, HEADS).unflatten(2, (-1, CHUNK)) for z in qkv.chunk(3, dim=-1)
        )  # [b h c l p]
        decay = self.decay[:, None, None, None]
        lag = behind(CHUNK).clamp(min=0)
        inside = decay**lag * (behind(CHUNK) >= 0)
        at = torch.arange(CHUNK)[:, None]
        added = (k * decay ** (CHUNK - 1 - at)).mT @ v
        before = self._carried(added, decay**CHUNK)
        y = (q @ k.mT * inside) @ v + (q * decay ** (at + 1)) @ before
        return merge(y.flatten(2, 3))

    def _carried(self, added: Tensor, decay: Tensor) -> Tensor:
        """Return the state before each chunk, from what each chunk adds [b h c p r]."""
        state, before = torch.zeros_like(added[:, :, 0]), []
        for one in added.unbind(2):
            before.append(state)
            state = decay[:, 0] * state + one
        return torch.stack(before, 2)


class Convolution(nn.Module):
    """A causal depthwise convolution beside a gate."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, 2 * D_MODEL)
        self.filter = nn.Parameter(torch.randn(D_MODEL, 1, KERNEL) / KERNEL**0.5)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        z, gate = self.enter(x).chunk(2, dim=-1)
        return self.out(self._convolved(z.mT).mT * F.silu(gate))

    def _convolved(self, z: Tensor) -> Tensor:
        return F.conv1d(F.pad(z, (KERNEL - 1, 0)), self.filter, groups=D_MODEL)


class NormalisedConvolution(Convolution):
    """Each token is normalised over its channels before it is convolved."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D_MODEL, 1))

    def _convolved(self, z: Tensor) -> Tensor:
        return super()._convolved(self._normalised(z) * self.scale)

    def _normalised(self, z: Tensor) -> Tensor:
        return z / (z.square().mean(1, keepdim=True) + 1e-5).sqrt()


class LongConvolution(Convolution):
    """A filter as long as the sequence, which decays, applied in the frequency domain."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(D_MODEL, 4))

    def _convolved(self, z: Tensor) -> Tensor:
        t = z.shape[-1]
        high = torch.promote_types(z.dtype, torch.float32)
        lag = torch.arange(t, device=z.device).to(high)
        basis = (-lag * torch.tensor([1.0, 0.5, 0.2, 0.1])[:, None].to(lag)).exp()
        n = self._period(t)
        of_filter = torch.fft.rfft(self.filter.to(high) @ basis, n=n)
        product = torch.fft.rfft(z.to(high), n=n) * of_filter
        return torch.fft.irfft(product, n=n)[..., :t].to(z.dtype)

    def _period(self, t: int) -> int:
        return 2 * t


class Forgetting(nn.Module):
    """Tokens fade by what each later one says, and at every 16th; log-decays are summed apart."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, D_MODEL)
        self.rate = nn.Linear(D_MODEL, 1)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        breaks = 20 * (torch.arange(x.shape[1]) % 16 == 0)
        rate = 0.1 * F.softplus(self.rate(x)[..., 0]) + breaks.to(x)
        return self.out(self._mixed(rate, self.enter(x)))

    def _mixed(self, rate: Tensor, z: Tensor) -> Tensor:
        lower = behind(rate.shape[1]) >= 0
        sums = (-rate[:, :, None] * (behind(rate.shape[1]) > 0)).cumsum(1)
        return (sums.exp() * lower) @ z
