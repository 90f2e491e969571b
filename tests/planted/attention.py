"""Correct causal attention in small methods, so that a fault can replace one."""

import torch
from torch import Tensor, nn

D_MODEL, HEADS = 16, 4


def rotate(z: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate vectors z [b h t p] by their positions, [t] or [b t], with angles in fp32 or more."""
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


def compute_lags(t: int) -> Tensor:
    """Return the distance i - j from key j to query i, as [t t]."""
    positions = torch.arange(t)
    return positions[:, None] - positions


class RightAttention(nn.Module):
    """Causal attention of four heads with rotary positions, written out."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.key = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.value = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(map(x)) for map in (self.query, self.key, self.value))
        return self.out(merge(self._mix(self._rotate(q), self._rotate(k), v)))

    def _split(self, z: Tensor) -> Tensor:
        return split(z, HEADS)

    def _rotate(self, z: Tensor) -> Tensor:
        return rotate(z, torch.arange(z.shape[2]))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._weigh(self._score(q, k)) @ v

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5

    def _weigh(self, scores: Tensor) -> Tensor:
        seen = self._make_mask(scores.shape[-1])
        return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)

    def _make_mask(self, t: int) -> Tensor:
        return compute_lags(t) >= 0


class CosineAttention(RightAttention):
    """Scores are cosines times 100, the largest scale that contrastive models learn."""

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        return 100 * nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT


class CappedAttention(RightAttention):
    """Scores are capped at 30 by a tanh, before the mask."""

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        return 30 * (super()._score(q, k) / 30).tanh()


class SmoothedAttention(RightAttention):
    """Scores are convolved over neighbouring keys, with masked scores set to zero."""

    def __init__(self):
        super().__init__()
        self.smooth = nn.Conv2d(HEADS, HEADS, (1, 3), padding=(0, 1), groups=HEADS, bias=False)

    def _weigh(self, scores: Tensor) -> Tensor:
        seen = self._make_mask(scores.shape[-1])
        return super()._weigh(self.smooth(scores.masked_fill(~seen, 0)))


class SparseAttention(RightAttention):
    """Each query keeps the four keys with the highest scores among those that it may attend to."""

    def _weigh(self, scores: Tensor) -> Tensor:
        seen = scores.masked_fill(~self._make_mask(scores.shape[-1]), -torch.inf)
        return super()._weigh(scores.masked_fill(~self._choose(seen), -torch.inf))

    def _choose(self, scores: Tensor) -> Tensor:
        n_chosen = min(4, scores.shape[-1])
        return scores >= scores.topk(n_chosen, dim=-1).values[..., -1:]


class LogAttention(RightAttention):
    """Scores are scaled by the logarithm of the number of keys that a query may attend to."""

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        n_seen = torch.arange(1, q.shape[2] + 1).to(q)
        return super()._score(q, k) * (1 + n_seen.log())[:, None]


class WindowAttention(RightAttention):
    """Each query attends to its own key and the seven before it."""

    def _make_mask(self, t: int) -> Tensor:
        return (compute_lags(t) >= 0) & (compute_lags(t) < 8)


class LearnedPositions(RightAttention):
    """Adds a learned vector for each absolute position, up to 256."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(256, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]; a longer sequence raises ValueError."""
        if x.shape[1] > 256:
            raise ValueError(f"{x.shape[1]} tokens must be at most 256")
        return super().forward(x + self.positions(self._list_positions(x.shape[1])))

    def _rotate(self, z: Tensor) -> Tensor:
        return z

    def _list_positions(self, t: int) -> Tensor:
        return torch.arange(t)


class ShownAttention(RightAttention):
    """Attention that returns its matrix."""

    def matrix(self, x: Tensor) -> Tensor:
        """Return the weights [b h t s]."""
        q, k = (self._rotate(self._split(map(x))) for map in (self.query, self.key))
        return self._weigh(self._score(q, k))

    def values(self, x: Tensor) -> Tensor:
        """Return the values [b h s p]."""
        return self._split(self.value(x))

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the output [b t d] of mixed values [b h t p]."""
        return self.out(merge(z))


class SilentZeros(RightAttention):
    """A vector of zeros has no output of its own, as padding might; that is causal."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x.abs().sum(-1, keepdim=True) > 0)


class DocumentAttention(RightAttention):
    """Attention within documents, `seq_idx` [b t], and to tokens only, `attention_mask` [b t]."""

    def forward(
        self, x: Tensor, seq_idx: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        b, t, _ = x.shape
        seen = (compute_lags(t) >= 0).expand(b, 1, t, t)
        if seq_idx is not None:
            seen = seen & self._match(seq_idx)[:, None]
        if attention_mask is not None:
            seen = seen & self._find_keys(attention_mask)[:, None, None]
        q, k, v = (self._split(map(x)) for map in (self.query, self.key, self.value))
        scores = self._score(self._rotate(q), self._rotate(k))
        return self.out(merge(self._weigh_seen(scores, seen) @ v))

    def _match(self, seq_idx: Tensor) -> Tensor:
        return seq_idx[:, :, None] == seq_idx[:, None]

    def _find_keys(self, attention_mask: Tensor) -> Tensor:
        return attention_mask.bool()

    def _weigh_seen(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
