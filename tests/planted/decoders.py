"""Decoders whose steps differ from their prefill, or whose positions are not relative."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.layers.state import token_positions
from tests.planted.attention import D_MODEL, HEADS, rotate
from tests.planted.cached import GROUPS, Cache, CachedAttention, WindowedCache
from tests.planted.entry import Fault
from tests.planted.scanned import ScanState, StateSpace
from tests.planted.scans import CHUNK


class _Stale(CachedAttention):
    """A prefill from a cache returns the cache unchanged."""

    def prefill(
        self, x: Tensor, state: Cache | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        y, after = super().prefill(x, state, keep)
        return y, after if state is None else state._replace(position=after.position)


class _InPlace(StateSpace):
    """A step overwrites the state it was given, as kernels that update in place do."""

    def step(self, x: Tensor, state: ScanState) -> tuple[Tensor, ScanState]:
        y, after = super().step(x, state)
        state.window.copy_(after.window)
        state.hidden.copy_(after.hidden)
        return y, after


class _Restarting(CachedAttention):
    """A step's query and key are at position zero."""

    def _get_step_position(self, state: Cache) -> Tensor:
        return torch.zeros_like(state.position)


class _OneLate(CachedAttention):
    """A step's query and key are one position late."""

    def _get_step_position(self, state: Cache) -> Tensor:
        return state.position + 1


class _ContinuesAtZero(CachedAttention):
    """A prefill from a cache counts its positions from zero."""

    def _compute_positions(self, x: Tensor, before: Cache, keep: Tensor | None) -> Tensor:
        return token_positions(x.shape[1], x.device, None, keep).expand(x.shape[:2])


class _PositionOfChunk(CachedAttention):
    """After a prefill from a cache, the position counts that prefill's tokens only."""

    def _extend(self, before: Cache, k: Tensor, v: Tensor, kept: Tensor, position: Tensor) -> Cache:
        read = position - before.position if k.shape[2] > 1 else position
        return super()._extend(before, k, v, kept, read)


class _TiledGroups(CachedAttention):
    """Groups are interleaved for several tokens, but tiled for a single one."""

    def _repeat_groups(self, z: Tensor, t: int) -> Tensor:
        if t == 1:
            return z.repeat(1, HEADS // GROUPS, 1, 1)
        return super()._repeat_groups(z, t)


class _TurnedAgain(CachedAttention):
    """A step's key is rotated twice."""

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        k = super()._rotate_key(k, positions)
        return super()._rotate_key(k, positions) if positions.shape[1] == 1 else k


class _ShorterWindow(WindowedCache):
    """A step attends to one token less of the window."""

    def _choose_window(self, t: int, s: int) -> int:
        return 7 if t == 1 and s > 1 else 8


class _ScoresByLength(CachedAttention):
    """Scores grow with the number of tokens read; a prefill from a cache counts its own only."""

    relative = False

    def _rotate_query(self, q: Tensor, positions: Tensor) -> Tensor:
        own = torch.arange(q.shape[2])[None]
        count = 1 + (own if q.shape[2] > 1 else positions).to(q)
        return super()._rotate_query(q * (1 + count.log())[:, None, :, None], positions)


class _HalfWindow(StateSpace):
    """A step keeps one input too few for the convolution."""

    def _slide(self, window: Tensor, z: Tensor) -> Tensor:
        return F.pad(super()._slide(window, z)[:, 1:], (0, 0, 1, 0))


class _WindowInFront(StateSpace):
    """A step puts its input in front of the convolution's others."""

    def _slide(self, window: Tensor, z: Tensor) -> Tensor:
        return torch.cat([z[:, None], window[:, :-1]], 1)


class _StepWithoutD(StateSpace):
    """A step leaves out D·x."""

    def _add_step_skip(self, y: Tensor, u: Tensor) -> Tensor:
        return y


class _StepWithoutBias(StateSpace):
    """A step's rate has no bias."""

    def _compute_step_rate(self, dt: Tensor) -> Tensor:
        return F.softplus(dt)


class _StepOtherSoftplus(StateSpace):
    """A step's softplus becomes linear at 1, forward's at 20."""

    def _compute_step_rate(self, dt: Tensor) -> Tensor:
        return F.softplus(dt + self.rate_bias, threshold=1)


class _NoCarry(StateSpace):
    """Nothing is carried from the second chunk on."""

    def _carry(self, added: Tensor, whole: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        before, last = super()._carry(added, whole, hidden)
        return torch.cat([before[:1], torch.zeros_like(before[1:])]), last


class _DecaysTwice(StateSpace):
    """The carry decays by its chunk's decay twice."""

    def _carry(self, added: Tensor, whole: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super()._carry(added, whole**2, hidden)


class _LastStateOfPadding(StateSpace):
    """The state decays over the zeros that fill up the last chunk."""

    def _run_chunks(
        self, u: Tensor, rate: Tensor, B: Tensor, C: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, last = super()._run_chunks(u, rate, B, C, hidden)
        spare = -u.shape[1] % CHUNK
        return y, last * 0.99**spare


class _Capacity(StateSpace):
    """A prefill routes its first 24 tokens through an expert, a step every token."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(D_MODEL, D_MODEL)

    def prefill(
        self, x: Tensor, state: ScanState | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, ScanState]:
        y, after = super().prefill(x, state, keep)
        inside = torch.arange(x.shape[1]) < 24
        return y + self.expert(y).relu() * inside[:, None], after

    def step(self, x: Tensor, state: ScanState) -> tuple[Tensor, ScanState]:
        y, after = super().step(x, state)
        return y + self.expert(y).relu(), after


class _AbsoluteKeys(CachedAttention):
    """A sine of the absolute position is added to the keys."""

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return super()._rotate_key(k + 0.1 * positions[:, None, :, None].to(k).sin(), positions)


class _TurnedValues(CachedAttention):
    """Values are rotated like keys, and not rotated back."""

    def _rotate_value(self, v: Tensor, positions: Tensor) -> Tensor:
        return rotate(v, positions)


class _TwoLayouts(CachedAttention):
    """Keys rotate pairs of adjacent channels, queries pairs across the two halves."""

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        order = torch.tensor([0, 2, 1, 3])
        return rotate(k[..., order], positions)[..., order]


class _TableEnds(CachedAttention):
    """Positions past 32,768 use the last angle of a table."""

    def _rotate_query(self, q: Tensor, positions: Tensor) -> Tensor:
        return rotate(q, positions.clamp(max=32_768))

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return rotate(k, positions.clamp(max=32_768))


class _CacheLeaks(CachedAttention):
    """The mask keeps one diagonal too many; decoding has no later key to read."""

    def _make_mask(self, t: int, after: Cache) -> Tensor:
        s = after.k.shape[2]
        return torch.ones(t, s, dtype=torch.bool).tril(s - t + 1) & after.kept[:, None]


DECODERS = (
    Fault("mask off by one beside a cache", "causal", _CacheLeaks),
    Fault("cache not extended", "prefill = step", _Stale),
    Fault("cache changed in place", "prefill = step", _InPlace),
    Fault("step at position zero", "prefill = step", _Restarting),
    Fault("step one position late", "prefill = step", _OneLate),
    Fault("prefill goes on at position zero", "prefill = step", _ContinuesAtZero),
    Fault("position of the last part only", "prefill = step", _PositionOfChunk, ("relative",)),
    Fault("groups tiled in a step", "prefill = step", _TiledGroups, ("causal", "padding")),
    Fault("key turned twice in a step", "prefill = step", _TurnedAgain),
    Fault("window one short in a step", "prefill = step", _ShorterWindow),
    Fault("scale counts the last part only", "prefill = step", _ScoresByLength, ("padding",)),
    Fault("convolution's state one short", "prefill = step", _HalfWindow),
    Fault("convolution's state in wrong order", "prefill = step", _WindowInFront),
    Fault("step without D", "prefill = step", _StepWithoutD),
    Fault("step without the rate's bias", "prefill = step", _StepWithoutBias),
    Fault("step with another softplus", "prefill = step", _StepOtherSoftplus),
    Fault("no carry from the second chunk on", "prefill = step", _NoCarry),
    Fault("carry decays twice", "prefill = step", _DecaysTwice),
    Fault(
        "state decays over the chunk's padding", "prefill = step", _LastStateOfPadding, ("padding",)
    ),
    Fault("capacity in prefill only", "prefill = step", _Capacity, ("padding",), "length above 24"),
    Fault("absolute positions in the keys", "relative", _AbsoluteKeys),
    Fault("values turned", "relative", _TurnedValues),
    Fault("two layouts of pairs", "relative", _TwoLayouts),
    Fault("table of angles ends", "relative", _TableEnds, notes="positions above 32,768"),
)
