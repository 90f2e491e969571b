"""Correct recurrences and convolutions in small methods, so that a fault can replace one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.attention import D_MODEL, HEADS, compute_lags, merge, split

CHUNK = 8
KERNEL = 4


class LinearAttention(nn.Module):
    """Linear attention: positive features instead of a softmax, and two running sums."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(z, HEADS) for z in self.qkv(x).chunk(3, dim=-1))
        q, k = self._make_positive(q), self._make_positive(k)
        above = torch.einsum(
            "bhtp, bhtpr -> bhtr", q, self._sum_products(k[..., None] * v[..., None, :])
        )
        below = (q * self._sum_keys(k)).sum(-1, keepdim=True)
        return self.out(merge(above / below))

    def _make_positive(self, z: Tensor) -> Tensor:
        return F.elu(z) + 1

    def _sum_products(self, kv: Tensor) -> Tensor:
        return kv.cumsum(2)

    def _sum_keys(self, k: Tensor) -> Tensor:
        return k.cumsum(2)


class Retention(nn.Module):
    """Linear attention with a fixed decay per head, in chunks of 8 with a carry between them."""

    decay: Tensor

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL)
        self.out = nn.Linear(D_MODEL, D_MODEL)
        self.register_buffer("decay", torch.tensor([0.5, 0.75, 0.9, 0.97]))

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        y = self._run_chunks(self._pad(self.qkv(x), -t % CHUNK))
        return self.out(self._cut(y, t))

    def _pad(self, z: Tensor, spare: int) -> Tensor:
        return F.pad(z, (0, 0, 0, spare))

    def _cut(self, y: Tensor, t: int) -> Tensor:
        return y[:, :t]

    def _run_chunks(self, qkv: Tensor) -> Tensor:
        q, k, v = (
            split(z, HEADS).unflatten(2, (-1, CHUNK)) for z in qkv.chunk(3, dim=-1)
        )  # [b h c l p]
        decay = self.decay[:, None, None, None]
        lag = compute_lags(CHUNK).clamp(min=0)
        inside = decay**lag * (compute_lags(CHUNK) >= 0)
        at = torch.arange(CHUNK)[:, None]
        added = (k * decay ** (CHUNK - 1 - at)).mT @ v
        before = self._carry(added, decay**CHUNK)
        y = (q @ k.mT * inside) @ v + (q * decay ** (at + 1)) @ before
        return merge(y.flatten(2, 3))

    def _carry(self, added: Tensor, decay: Tensor) -> Tensor:
        """Return the state before each chunk, from what each chunk adds [b h c p r]."""
        state, before = torch.zeros_like(added[:, :, 0]), []
        for one in added.unbind(2):
            before.append(state)
            state = decay[:, 0] * state + one
        return torch.stack(before, 2)


class Convolution(nn.Module):
    """A causal depthwise convolution, multiplied by a gate."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, 2 * D_MODEL)
        self.filter = nn.Parameter(torch.randn(D_MODEL, 1, KERNEL) / KERNEL**0.5)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        z, gate = self.enter(x).chunk(2, dim=-1)
        return self.out(self._convolve(z.mT).mT * F.silu(gate))

    def _convolve(self, z: Tensor) -> Tensor:
        return F.conv1d(F.pad(z, (KERNEL - 1, 0)), self.filter, groups=D_MODEL)


class NormalisedConvolution(Convolution):
    """Each token is normalised over its channels before it is convolved."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D_MODEL, 1))

    def _convolve(self, z: Tensor) -> Tensor:
        return super()._convolve(self._normalise(z) * self.scale)

    def _normalise(self, z: Tensor) -> Tensor:
        return z / (z.square().mean(1, keepdim=True) + 1e-5).sqrt()


class LongConvolution(Convolution):
    """A filter as long as the sequence, which decays, applied in the frequency domain."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(D_MODEL, 4))

    def _convolve(self, z: Tensor) -> Tensor:
        t = z.shape[-1]
        high = torch.promote_types(z.dtype, torch.float32)
        lag = torch.arange(t, device=z.device).to(high)
        basis = (-lag * torch.tensor([1.0, 0.5, 0.2, 0.1])[:, None].to(lag)).exp()
        n = self._choose_period(t)
        of_filter = torch.fft.rfft(self.filter.to(high) @ basis, n=n)
        product = torch.fft.rfft(z.to(high), n=n) * of_filter
        return torch.fft.irfft(product, n=n)[..., :t].to(z.dtype)

    def _choose_period(self, t: int) -> int:
        return 2 * t


class Forgetting(nn.Module):
    """Decays depend on each later token and are strong at every 16th; log-decays are summed."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, D_MODEL)
        self.rate = nn.Linear(D_MODEL, 1)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        breaks = 20 * (torch.arange(x.shape[1]) % 16 == 0)
        rate = 0.1 * F.softplus(self.rate(x)[..., 0]) + breaks.to(x)
        return self.out(self._mix(rate, self.enter(x)))

    def _mix(self, rate: Tensor, z: Tensor) -> Tensor:
        lower = compute_lags(rate.shape[1]) >= 0
        sums = (-rate[:, :, None] * (compute_lags(rate.shape[1]) > 0)).cumsum(1)
        return (sums.exp() * lower) @ z


class SlowAverage(nn.Module):
    """h ← .999 h + u, token by token, whose every step rounds; .999 is another number in fp32."""

    rate = 0.999

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        h, hs = torch.zeros_like(x[:, 0]), []
        for i, u in enumerate(self.enter(x).unbind(1)):
            h = self._pass_on(i, self.rate * h + u)
            hs.append(h)
        return torch.stack(hs, 1)

    def _pass_on(self, i: int, h: Tensor) -> Tensor:
        return h


class Average(SlowAverage):
    """The same, with .98."""

    rate = 0.98


class TimeFirst(Average):
    """The same from [t b d] to [t b d]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)
