"""Token codes: unit vectors that are as different as their width allows.

`Channels` says which channels of a rotated vector hold them, so that rotation hardly changes them.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from lab.constructions.cannot import CannotError
from lab.layers.attention import Attention
from lab.layers.ssd import SSD

MANY = 1024
"""Maximum number of codes that are spread, which takes less than a second; more stay random."""
STEPS = 150


class Cosines(NamedTuple):
    """How alike codes are.

    Attributes:
        own: the least cosine of a code with itself: 1, or less where one of the two was rotated.
        highest: the largest cosine of two codes, at least 0.
        lowest: the smallest cosine of two codes, at most 0.
    """

    own: float
    highest: float
    lowest: float


@lru_cache(maxsize=32)
def spread(count: int, width: int) -> Float64[Tensor, "count width"]:
    """Return `count` unit vectors of `width` channels, always the same ones. Do not change them.

    These are the axes if there are enough. Else they start random and repel one another, the most
    similar and the most opposite ones the most, until the largest |cosine| is near Welch's bound,
    √((count − width) / (width (count − 1))), the least that is possible.
    """
    if count <= width:
        return torch.eye(count, width, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(count, width, generator=generator, dtype=torch.float64)
    codes = codes / codes.norm(dim=1, keepdim=True)
    if count > MANY:
        return codes
    best, least = codes, 1.0
    for step in range(STEPS):
        alike = (codes @ codes.T).fill_diagonal_(0)
        largest = alike.abs().max().item()
        if largest < least:
            best, least = codes, largest
        # The softmax gets sharper, so that in the end only the nearest neighbours push.
        push = (10 * (1 + 40 * step / STEPS) * alike.abs()).softmax(1) * alike.sign()
        codes = codes - 0.1 * (push @ codes)
        codes = codes / codes.norm(dim=1, keepdim=True)
    return best


@lru_cache(maxsize=32)
def compare_spread_codes(count: int, width: int) -> Cosines:
    """Return the cosines among the codes of `spread`."""
    return compare(spread(count, width), spread(count, width))


def compare(codes: Float64[Tensor, "count a"], others: Float64[Tensor, "count a"]) -> Cosines:
    """Return the cosines of codes with `others`, their rotated versions; computed in blocks."""
    own = (codes * others).sum(1).min().item()
    highest = lowest = 0.0
    for start in range(0, len(codes), MANY):
        product = codes[start : start + MANY] @ others.T
        product.diagonal(start).fill_(0)
        low, high = product.aminmax()
        highest, lowest = max(highest, high.item()), min(lowest, low.item())
    return Cosines(own, highest, lowest)


def welch(count: int, width: int) -> float:
    """Return Welch's bound: of any `count` unit vectors, two have at least this |cosine|."""
    if count <= width:
        return 0.0
    return ((count - width) / (width * (count - 1))) ** 0.5


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
