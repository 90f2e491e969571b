"""Which channels of a rotated vector hold codes, so that rotation hardly changes them."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from lab.constructions.cannot import CannotError
from lab.constructions.codes import Cosines, compare, compare_spread_codes, spread
from lab.layers.attention import Attention
from lab.layers.ssd import SSD

NEARLY_STILL = 0.35
"""Maximum angle over a row at which both channels of a pair hold code; they mix by its sine."""
DISTANCES = 9
"""Number of distances at which codes are compared."""
SLOW = 1.0
"""Maximum angle at which one channel of a pair holds code; it fades to cos 1 = .54."""


class Channels(NamedTuple):
    """Channels of a vector that may be rotated to its position.

    Attributes:
        width: of the vector.
        layout: which channels are a pair, as in `lab.ops.rope`; None where nothing turns.
        base: of the rotation.
        what: the vector and its layer, for messages.
    """

    width: int
    layout: str | None
    base: float
    what: str

    def theta(self, pair: int) -> float:
        """Return the radians by which a pair rotates from one position to the next."""
        return 0.0 if self.layout is None else self.base ** (-2 * pair / self.width)

    def pair(self, m: int) -> tuple[int, int]:
        """Return the two channels of pair m."""
        half = self.width // 2
        return (2 * m, 2 * m + 1) if self.layout == "interleaved" else (m, m + half)

    def list_still(self, seq_len: int, reserved: int = 0) -> list[list[int]]:
        """Return the choices of channels: one of each slow pair, or both of each very slow pair.

        Args:
            seq_len: tokens over which the channels must hardly rotate.
            reserved: how many of the slowest pairs are left out.
        """
        if self.layout is None:
            return [list(range(2 * reserved, self.width))]
        slowest = range(self.width // 2 - 1 - reserved, -1, -1)
        both = [c for m in slowest if self.theta(m) * seq_len <= NEARLY_STILL for c in self.pair(m)]
        one = [self.pair(m)[0] for m in slowest if self.theta(m) * seq_len <= SLOW]
        return [one, both]

    def choose_places(self, count: int, seq_len: int, reserved: int = 0) -> tuple[int, ...]:
        """Return `count` channels for a code, one of a pair where there are enough.

        Raises:
            CannotError: when too few channels are slow enough.
        """
        ways = self.list_still(seq_len, reserved)
        for way in ways:
            if len(way) >= count:
                return tuple(way[:count])
        most = max(map(len, ways))
        raise CannotError(
            f"seq_len={seq_len}: {self.what} has {most} channels slow enough for content, "
            f"{count} are needed; position=none for that block or a larger rope_base would work"
        )

    def choose_slowest(self, count: int, seq_len: int) -> tuple[int, ...]:
        """Return `count` channels for a code, both of a pair where there are enough.

        Raises:
            CannotError: when too few channels are slow enough.
        """
        *_, both = self.list_still(seq_len)
        return tuple(both[:count]) if len(both) >= count else self.choose_places(count, seq_len)

    def count_room(self, seq_len: int, reserved: int = 0) -> int:
        """Return how many channels hold content over seq_len tokens."""
        return max(map(len, self.list_still(seq_len, reserved)))

    def compare_codes(
        self, count: int, width: int, places: tuple[int, ...], seq_len: int
    ) -> Cosines:
        """Return the cosines of codes, as a query sees them at any distance in a row."""
        if self.layout is None:
            return compare_spread_codes(count, width)
        return _compare_turned(self, count, width, places, seq_len)

    def turn(
        self, codes: Float64[Tensor, "count width"], places: tuple[int, ...], lag: float
    ) -> Float64[Tensor, "count width"]:
        """Return codes as a query sees them `lag` tokens later."""
        whole = codes.new_zeros(len(codes), self.width)
        whole[:, list(places)] = codes
        seen = whole.clone()
        pairs = [self.pair(m) for m in range(self.width // 2)]
        first, second = ([pair[side] for pair in pairs] for side in (0, 1))
        angles = [lag * self.theta(m) for m in range(len(pairs))]
        cos, sin = (codes.new_tensor(list(map(f, angles))) for f in (math.cos, math.sin))
        seen[:, first] = cos * whole[:, first] + sin * whole[:, second]
        seen[:, second] = cos * whole[:, second] - sin * whole[:, first]
        return seen[:, list(places)]


@lru_cache(maxsize=32)
def _compare_turned(
    channels: Channels, count: int, width: int, places: tuple[int, ...], seq_len: int
) -> Cosines:
    codes = spread(count, width)
    lags = torch.linspace(0, seq_len - 1, DISTANCES).tolist()
    seen = [compare(codes, channels.turn(codes, places, lag)) for lag in lags]
    return Cosines(
        own=min(s.own for s in seen),
        highest=max(s.highest for s in seen),
        lowest=min(s.lowest for s in seen),
    )


def find_channels(mixer: Attention | SSD) -> Channels:
    """Return the channels of a head's queries and keys, or of a state's C and B."""
    rotated = mixer.position == "rope"
    layout = mixer.rope_layout if rotated else None
    if isinstance(mixer, SSD):
        width = mixer.B_proj.out_features // mixer.n_groups
        return Channels(width, layout, mixer.rope_base, f"a state of d_state={width}")
    width = mixer.k.out_features // mixer.n_kv_heads
    return Channels(width, layout, mixer.rope_base, f"a head of {width} channels")
