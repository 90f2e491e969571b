"""Right causal attention, in pieces of which a fault replaces one."""

import torch
from torch import Tensor, nn

D_MODEL, HEADS = 16, 4


def turned(z: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Return vectors z [b h t p] turned to their positions, [t] or [b t], angles in fp32."""
    high = torch.promote_types(z.dtype, torch.float32)
    half = z.shape[-1] // 2
    rates = base ** -(torch.arange(half, device=z.device, dtype=torch.float64) / half)
    angles = positions[..., None].to(high) * rates.to(high)
    if positions.ndim == 2:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    z1, z2 = z.to(high).chunk(2, dim=-1)
    return torch.cat([z1 * cos - z2 * sin, z2 * cos + z1 * sin], dim=-1).to(z.dtype)


def split(z: Tensor, heads: int) -> Tensor:
    """Return [b t (h p)] as [b h t p]."""
    return z.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(z: Tensor) -> Tensor:
    """Return [b h t p] as [b t (h p)]."""
    return z.transpose(1, 2).flatten(2)


def behind(t: int) -> Tensor:
    """Return how far key j stands behind query i, i - j, as [t t]."""
    positions = torch.arange(t)
    return positions[:, None] - positions


class Attention(nn.Module):
    """Causal attention of four heads with rotary positions, written out."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.key = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.value = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        q, k, v = (self._split(map(x)) for map in (self.query, self.key, self.value))
        return self.out(merge(self._mixed(self._turned(q), self._turned(k), v)))

    def _split(self, z: Tensor) -> Tensor:
        return split(z, HEADS)

    def _turned(self, z: Tensor) -> Tensor:
        return turned(z, torch.arange(z.shape[2]))

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._weights(self._scores(q, k)) @ v

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5

    def _weights(self, scores: Tensor) -> Tensor:
        seen = self._seen(scores.shape[-1])
        return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)

    def _seen(self, t: int) -> Tensor:
        return behind(t) >= 0


class CosineAttention(Attention):
    """Scores are cosines times 100, the bound that contrastive models learn up to."""

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 100 * nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT


class CappedAttention(Attention):
    """Scores are capped at 30 by a tanh, before the mask."""

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 30 * (super()._scores(q, k) / 30).tanh()


class SmoothedAttention(Attention):
    """Scores are convolved over neighbouring keys, those not seen taken as zero."""

    def __init__(self):
        super().__init__()
        self.smooth = nn.Conv2d(HEADS, HEADS, (1, 3), padding=(0, 1), groups=HEADS, bias=False)

    def _weights(self, scores: Tensor) -> Tensor:
        seen = self._seen(scores.shape[-1])
        return super()._weights(self.smooth(scores.masked_fill(~seen, 0)))


class SparseAttention(Attention):
    """Each query keeps the four keys of the highest scores among those that it sees."""

    def _weights(self, scores: Tensor) -> Tensor:
        seen = scores.masked_fill(~self._seen(scores.shape[-1]), -torch.inf)
        return super()._weights(scores.masked_fill(~self._chosen(seen), -torch.inf))

    def _chosen(self, scores: Tensor) -> Tensor:
        n_chosen = min(4, scores.shape[-1])
        return scores >= scores.topk(n_chosen, dim=-1).values[..., -1:]


class LogAttention(Attention):
    """Scores grow with the logarithm of the number of keys that a query sees."""

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        n_seen = torch.arange(1, q.shape[2] + 1).to(q)
        return super()._scores(q, k) * (1 + n_seen.log())[:, None]


class WindowAttention(Attention):
    """Each query sees itself and the seven keys before it."""

    def _seen(self, t: int) -> Tensor:
        return (behind(t) >= 0) & (behind(t) < 8)


class LearnedPositions(Attention):
    """Adds a learned vector for each absolute position, up to 256."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(256, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]; a longer sequence raises ValueError."""
        if x.shape[1] > 256:
            raise ValueError(f"{x.shape[1]} tokens must be at most 256")
        return super().forward(x + self.positions(self._index(x.shape[1])))

    def _turned(self, z: Tensor) -> Tensor:
        return z

    def _index(self, t: int) -> Tensor:
        return torch.arange(t)
