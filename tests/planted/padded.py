"""Decoders in which padding has an effect."""

import torch
from torch import Tensor

from tests.planted.cached import Cache, CachedAttention
from tests.planted.entry import Fault
from tests.planted.scanned import ScanState, StateSpace


class _ReadsPadding(CachedAttention):
    """Padded keys are attended to."""

    def _make_mask(self, t: int, after: Cache) -> Tensor:
        s = after.k.shape[2]
        return torch.ones(len(after.k), t, s, dtype=torch.bool).tril(s - t)


class _LastPartOnly(CachedAttention):
    """Padding from an earlier prefill is attended to."""

    def _extend(self, before: Cache, k: Tensor, v: Tensor, kept: Tensor, position: Tensor) -> Cache:
        earlier = before._replace(kept=torch.ones_like(before.kept))
        return super()._extend(earlier, k, v, kept, position)


class _PaddingCounts(CachedAttention):
    """Padding takes up positions within a prefill, but not in the state's position."""

    def _compute_positions(self, x: Tensor, before: Cache, keep: Tensor | None) -> Tensor:
        return super()._compute_positions(x, before, None)


class _PaddingAdvances(CachedAttention):
    """The state's position counts padding."""

    def prefill(
        self, x: Tensor, state: Cache | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        y, after = super().prefill(x, state, keep)
        began = 0 if state is None else state.position
        return y, after._replace(position=torch.zeros_like(after.position) + began + x.shape[1])


class _NanForEmptyRows(CachedAttention):
    """A query whose keys are all masked gets a softmax of minus infinities."""

    def _softmax(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)


class _ExpThenMask(CachedAttention):
    """The mask is applied after the exponential, which may be infinite: 0·inf in backward."""

    def _softmax(self, scores: Tensor, seen: Tensor) -> Tensor:
        powers = scores.exp().where(seen, 0)
        return powers / powers.sum(-1, keepdim=True).clamp(min=1e-30)


class _RootOfZero(CachedAttention):
    """Padding is set to zero, then divided by its norm: 0·inf in backward."""

    def prefill(
        self, x: Tensor, state: Cache | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        kept = x if keep is None else x * keep[..., None]
        return super().prefill(self._normalise(kept), state, keep)

    def step(self, x: Tensor, state: Cache) -> tuple[Tensor, Cache]:
        return super().step(self._normalise(x), state)

    def _normalise(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-6)


class _FirstRowsMask(CachedAttention):
    """The first row's padding mask is used for all rows."""

    def _make_mask(self, t: int, after: Cache) -> Tensor:
        return super()._make_mask(t, after._replace(kept=after.kept[:1].expand_as(after.kept)))


class _PaddingEnters(StateSpace):
    """Padding after a row's tokens enters the recurrence."""

    def _mask_rate(self, rate: Tensor, kept: Tensor) -> Tensor:
        return rate


class _PaddingDecays(StateSpace):
    """Padding adds nothing to the state, but the state decays during it."""

    def prefill(
        self, x: Tensor, state: ScanState | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, ScanState]:
        y, after = super().prefill(x, state, keep)
        if keep is None:
            return y, after
        over = 0.95 ** (~keep).sum(1).to(x)
        return y, after._replace(hidden=after.hidden * over[:, None, None, None])


class _WindowOfPadding(StateSpace):
    """The convolution's state holds the last inputs, padding included."""

    def _keep_window(self, read: Tensor, n_kept: Tensor) -> Tensor:
        return read[:, -3:]


class _PaddingFromLeft(StateSpace):
    """A row is read from its first real token on, later padding included."""

    def prefill(
        self, x: Tensor, state: ScanState | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, ScanState]:
        if keep is not None:
            first = keep.int().argmax(1, keepdim=True)
            keep = (torch.arange(x.shape[1]) >= first) & keep.any(1, keepdim=True)
        return super().prefill(x, state, keep)


PADDED = (
    Fault("padded keys attended", "padding", _ReadsPadding),
    Fault("padding attended once cached", "padding", _LastPartOnly),
    Fault("padding moves the angles", "padding", _PaddingCounts),
    Fault("padding counts in the state", "padding", _PaddingAdvances),
    Fault("row of padding gives NaN", "padding", _NanForEmptyRows),
    Fault("mask after the exponential", "padding", _ExpThenMask, notes="gradient"),
    Fault("root of zeroed padding", "padding", _RootOfZero, notes="gradient"),
    Fault("first row's padding for all", "padding", _FirstRowsMask),
    Fault("padding enters the recurrence", "padding", _PaddingEnters),
    Fault("state decays over padding", "padding", _PaddingDecays),
    Fault("padding enters the convolution's state", "padding", _WindowOfPadding),
    Fault("only left padding is known", "padding", _PaddingFromLeft),
)
