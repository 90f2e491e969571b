"""Correct attention over a cache in small methods, so that a fault can replace one."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lab.layers.state import next_position, token_positions
from tests.planted.attention import D_MODEL, HEADS, merge, rotate, split

GROUPS = 2


class Cache(NamedTuple):
    """The keys and values read so far, and which of them are not padding."""

    k: Tensor  # [b g s p]
    v: Tensor  # [b g s p]
    kept: Tensor  # [b s]
    position: Tensor  # [b]


class CachedAttention(nn.Module):
    """Four query heads over two key-value heads, with rotary positions."""

    relative = True

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(D_MODEL, D_MODEL)
        self.key = nn.Linear(D_MODEL, D_MODEL // HEADS * GROUPS)
        self.value = nn.Linear(D_MODEL, D_MODEL // HEADS * GROUPS)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.prefill(x)[0]

    def start(self, batch: int, position: int = 0) -> Cache:
        none = self.key.weight.new_zeros(batch, GROUPS, 0, D_MODEL // HEADS)
        return Cache(none, none, none[:, 0, :, 0].bool(), torch.full((batch,), position))

    def prefill(
        self, x: Tensor, state: Cache | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        before = self.start(len(x)) if state is None else state
        positions = self._compute_positions(x, before, keep)
        return self._read(x, before, keep, positions)

    def step(self, x: Tensor, state: Cache) -> tuple[Tensor, Cache]:
        y, after = self._read(x[:, None], state, None, self._get_step_position(state)[:, None])
        return y[:, 0], after

    def _compute_positions(self, x: Tensor, before: Cache, keep: Tensor | None) -> Tensor:
        return token_positions(x.shape[1], x.device, before, keep)

    def _get_step_position(self, state: Cache) -> Tensor:
        return state.position

    def _read(
        self, x: Tensor, before: Cache, keep: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Cache]:
        q = self._rotate_query(split(self.query(x), HEADS), positions)
        k = self._rotate_key(split(self.key(x), GROUPS), positions)
        kept = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        v = self._rotate_value(split(self.value(x), GROUPS), positions)
        after = self._extend(before, k, v, kept, next_position(x, before, keep))
        weights = self._weigh(q, after)
        return self.out(merge(weights @ self._repeat_groups(after.v, q.shape[2]))), after

    def _rotate_query(self, q: Tensor, positions: Tensor) -> Tensor:
        return rotate(q, positions)

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return rotate(k, positions)

    def _rotate_value(self, v: Tensor, positions: Tensor) -> Tensor:
        return v

    def _extend(self, before: Cache, k: Tensor, v: Tensor, kept: Tensor, position: Tensor) -> Cache:
        return Cache(
            torch.cat([before.k, k], 2),
            torch.cat([before.v, v], 2),
            torch.cat([before.kept, kept], 1),
            position,
        )

    def _repeat_groups(self, z: Tensor, t: int) -> Tensor:
        """Repeat each group's keys or values [b g s p] for its query heads, reading t tokens."""
        return z.repeat_interleave(HEADS // GROUPS, dim=1)

    def _weigh(self, q: Tensor, after: Cache) -> Tensor:
        scores = q @ self._repeat_groups(after.k, q.shape[2]).mT / q.shape[-1] ** 0.5
        return self._softmax(scores, self._make_mask(q.shape[2], after)[:, None])

    def _softmax(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Return the weights, zero for a query whose keys are all masked."""
        scores = scores.masked_fill(~seen, -torch.inf)
        return scores.masked_fill(~seen.any(-1, keepdim=True), 0).softmax(-1) * seen

    def _make_mask(self, t: int, after: Cache) -> Tensor:
        """Return a mask of the keys that the last t tokens attend to [b t s]."""
        s = after.k.shape[2]
        return torch.ones(t, s, dtype=torch.bool).tril(s - t) & after.kept[:, None]


class WindowedCache(CachedAttention):
    """Each token attends to itself and to the seven tokens kept before it in the cache."""

    def _make_mask(self, t: int, after: Cache) -> Tensor:
        s = after.k.shape[2]
        count = after.kept.cumsum(1)
        near = count[:, -t:, None] - count[:, None] < self._choose_window(t, s)
        return super()._make_mask(t, after) & near

    def _choose_window(self, t: int, s: int) -> int:
        return 8


class LeastMask(CachedAttention):
    """The mask adds the least number of the precision; a softmax in fp32 makes it -inf in fp64."""

    def _softmax(self, scores: Tensor, seen: Tensor) -> Tensor:
        masked = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return masked.softmax(-1, dtype=torch.float32).to(scores.dtype)


class NormedSum(nn.Module):
    """A sum that forgets, normalised for the output only."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(D_MODEL, D_MODEL)
        self.norm = nn.RMSNorm(D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        total, outputs = torch.zeros_like(x[:, 0]), []
        for one in self.mix(x).unbind(1):
            total = 0.9 * total + one
            outputs.append(self.norm(total))
        return torch.stack(outputs, 1)

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = self.mix(x) if state is None else 0.9 * state + self.mix(x)
        return self.norm(total), total


class StateBeside(nn.Module):
    """A gated average: forward returns its state beside its output, and step takes it."""

    def __init__(self):
        super().__init__()
        self.enter, self.forget = nn.Linear(D_MODEL, D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hs = [torch.zeros_like(x[:, 0])]
        for one in x.unbind(1):
            hs.append(self._update(one, hs[-1]))
        return self.out(torch.stack(hs[1:], 1)), self._choose_state(hs)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self._update(x, state)
        return self.out(h), h

    def _update(self, x: Tensor, h: Tensor) -> Tensor:
        share = self.forget(x).sigmoid()
        return share * h + (1 - share) * self.enter(x)

    def _choose_state(self, hs: list[Tensor]) -> Tensor:
        return hs[-1]
