"""How foreign attention rotates its queries and keys: found by calling it with other angles."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias, TypeGuard, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lab.foreign.mixer import is_close
from lab.ops.rope import Layout

Angles: TypeAlias = tuple[Float[Tensor, "b t w"], Float[Tensor, "b t w"]]
"""cos and sin of the angles, of w channels or of w pairs of channels."""
FACTOR = 2.0
"""Multiplies the cosines and sines of a trial: a norm after the rotation would undo it."""


class ForeignRotation(NamedTuple):
    """The channels of a head that are rotated, and how they pair up.

    Attributes:
        width: how many channels; 0 where a layer does not rotate.
        last: whether they are the last of the head; otherwise they are the first.
        layout: as in `lab.ops.rope`.
        table: how cosines and sines are laid out: one for each pair of channels, or twice in one of
            the layouts, which need not be that of the channels.
    """

    width: int
    last: bool
    layout: Layout
    table: Layout | Literal["pairs"] = "half"

    def turn(self, x: Float[Tensor, "b h t p"], angles: Angles) -> Float[Tensor, "b h t p"]:
        """Return heads rotated by angles."""
        if self.width == 0:
            return x
        kept = x.shape[-1] - self.width
        parts = [kept, self.width] if self.last else [self.width, kept]
        first, second = x.split(parts, -1)
        if self.last:
            return torch.cat([first, self._turn_all(second, angles)], -1)
        return torch.cat([self._turn_all(first, angles), second], -1)

    def _turn_all(self, x: Float[Tensor, "b h t w"], angles: Angles) -> Float[Tensor, "b h t w"]:
        cos, sin = (self._widen(table)[:, None] for table in angles)
        if self.layout == "half":
            one, other = x.chunk(2, -1)
            crossed = torch.cat([-other, one], -1)
        else:
            crossed = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        # In the order of the libraries' own operations: what is only looked at keeps its bits.
        return x * cos + crossed * sin

    def _widen(self, table: Float[Tensor, "b t w"]) -> Float[Tensor, "b t n"]:
        """Return a number for each channel."""
        if self.table == "half":
            table = table[..., : self.width // 2]
        elif self.table == "interleaved":
            table = table[..., ::2]
        if self.layout == "half":
            return torch.cat([table, table], -1)
        return table.repeat_interleave(2, -1)


Heads: TypeAlias = tuple[Float[Tensor, "b h t p"], Float[Tensor, "b g t p"]]
"""Queries and keys."""


def is_table(given: object, t: int) -> TypeGuard[Angles]:
    """Whether what a layer is given are cosines and sines, one row for each of t tokens."""
    if not (isinstance(given, tuple) and len(given) == 2):
        return False
    return all(isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] == t for x in given)


def find_rotation(before: Heads, after: Heads, angles: Angles) -> ForeignRotation | None:
    """Return how heads were rotated; None where it is done in another way.

    Args:
        before: the heads without a rotation.
        after: the heads rotated by the angles.
        angles: of a length other than 1, as `FACTOR` makes them.
    """
    for rotation in _list_rotations(before[0].shape[-1], angles[0].shape[-1]):
        found = [rotation.turn(x, angles) for x in before]
        if all(is_close(x, asked) for x, asked in zip(found, after, strict=True)):
            return rotation
    return None


def _list_rotations(p: int, w: int) -> Iterator[ForeignRotation]:
    """Yield the rotations of heads of p channels that tables of width w may mean."""
    yield ForeignRotation(0, False, "half")
    for table in ("half", "interleaved", "pairs"):
        width = 2 * w if table == "pairs" else w
        if width > p or width % 2:
            continue
        for last in (False, True) if width < p else (False,):
            for layout in get_args(Layout):
                yield ForeignRotation(width, last, layout, table)
