"""Random numbers without a generator: every word is a function of (key, split, row, index).

Words are outputs of splitmix64 (Steele, Lea, Flood 2014). All else is built on them with integer
arithmetic, table look-ups and sorts of distinct integers, so CPU and CUDA agree bit for bit.

Axes: b row, i word or item, m point.
"""

from dataclasses import dataclass
from hashlib import blake2b

from jaxtyping import Bool, Float64, Int, Int32, Int64

from tasks.lazy import Tensor, torch

INDEX_BITS, ROW_BITS = 24, 36
"""A counter is split (4 bits), row (36), index (24): no two rows share one."""


def _to_signed(word: int) -> int:
    """Return the int64 with the low 64 bits of `word`."""
    return ((word + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


_GAMMA = 0x9E3779B97F4A7C15
_STEPS = ((30, _to_signed(0xBF58476D1CE4E5B9)), (27, _to_signed(0x94D049BB133111EB)), (31, 1))


# The bin of a float32 in [1, 2²³): its exponent and the first 11 bits of its mantissa.
_BIN_SHIFT = 23 - 11
_FIRST_BIN, _END_BIN = 127 << 11, 127 + 23 << 11


def derive_key(name: str, seed: int) -> int:
    """Derive the 64-bit key of a stream of words from its name and a seed."""
    digest = blake2b(f"{name} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def splitmix64(seed: int, index: int) -> int:
    """Return output `index` of splitmix64, in plain integers."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * _GAMMA) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def draw_words(key: int, split: int, rows: Int64[Tensor, " b"], count: int) -> Int64[Tensor, "b i"]:
    """Draw 64 random bits for each row and index 0 … count − 1 (at most 2²⁴)."""
    return draw_words_at(key, split, rows, torch.arange(count, device=rows.device)[None])


def draw_words_at(
    key: int, split: int, rows: Int64[Tensor, " b"], index: Int64[Tensor, "#b i"]
) -> Int64[Tensor, "b i"]:
    """Draw 64 random bits for each row and index.

    Word i of row r is output (split·2³⁶ + r)·2²⁴ + i of splitmix64 seeded with `key`. The
    counter is mixed by a bijection, so two splits or rows of one key never share a word.

    Args:
        key: from `derive_key`.
        split: in 0 … 15.
        rows: row numbers in 0 … 2³⁶ − 1.
        index: in 0 … 2²⁴ − 1, the same for all rows or one set for each.
    """
    first = _to_signed(key + _GAMMA * ((split << ROW_BITS + INDEX_BITS) + 1))
    word = (rows * _to_signed(_GAMMA << INDEX_BITS) + first)[:, None] + index * _to_signed(_GAMMA)
    shifted = torch.empty_like(word)
    for shift, factor in _STEPS:
        torch.bitwise_right_shift(word, shift, out=shifted)
        shifted &= (1 << 64 - shift) - 1  # int64 shifts copy the sign; splitmix64 shifts in zeros
        word ^= shifted
        if factor != 1:
            word *= factor
    return word


def draw_below(word: Int64[Tensor, "b i"], n: int | Int64[Tensor, "#b #i"]) -> Int64[Tensor, "b i"]:
    """Draw a number in 0 … n − 1 from the low half of each word, uniform to n/2³² (n ≤ 2³¹)."""
    return (word & 0xFFFFFFFF).mul_(n).bitwise_right_shift_(32)


def draw_truth(word: Int64[Tensor, "b i"], p: float) -> Bool[Tensor, "b i"]:
    """Draw True with probability p, to 2⁻³², from the low half of each word."""
    return (word & 0xFFFFFFFF) < int(p * 2**32)


def draw_order(word: Int64[Tensor, "b i"]) -> Int64[Tensor, "b i"]:
    """Draw a random order of 0 … i − 1 for each row: the order that would sort its words."""
    return word.argsort(dim=1, stable=True)


def draw_distinct(word: Int64[Tensor, "b r"], count: int, n: int) -> Int64[Tensor, "b m"]:
    """Draw `count` distinct numbers in 0 … n − 1 for each row, from `count_rounds(n)` words."""
    points = torch.arange(count, device=word.device).expand(len(word), -1)
    return permute(word, points, n).long()


def count_rounds(n: int) -> int:
    """Return how many words `permute` needs for a row: small domains mix more slowly.

    With so many rounds, first outputs, pairs and differences of 10⁶ rows look random.
    """
    return max(4, 16 - (n - 1).bit_length())


def permute(
    word: Int64[Tensor, "b r"],
    points: Int[Tensor, "b m"],
    n: int,
    *,
    lanes: int = 1,
    keep_zero: bool = False,
) -> Int[Tensor, "b m"]:
    """Apply a random permutation of 0 … n·lanes − 1, a different one for each row, to points.

    Each of the `count_rounds(n)` rounds is x ← x·odd + c, x ← x ⊕ (x ≫ s) modulo the next power of
    two; every step is a bijection. An image out of range is permuted again until it is in range.
    The cost of a point does not depend on n.

    Args:
        word: `count_rounds(n)` words for each row.
        points: in 0 … n·lanes − 1.
        n: numbers in each lane; n·lanes ≤ 2³⁰.
        lanes: a power of two; a point keeps its remainder modulo `lanes`, and each remainder
            has a permutation of its own.
        keep_zero: map 0 to itself, and the rest of its lane at random.
    """
    lane, bits = lanes.bit_length() - 1, (n - 1).bit_length()
    # 16 bits are enough for usual vocabularies, and faster.
    dtype = torch.int16 if lane + bits < 16 else torch.int32
    factor, step = (word << lane | 1).to(dtype), (word >> 32 << lane).to(dtype)
    shift, low = min(bits // 2 + 1, max(bits - 1, 1)), (1 << lane + bits) - 1
    folded = (low >> shift) & -lanes

    if keep_zero:
        x = torch.empty(len(word), points.shape[1] + 1, dtype=dtype, device=points.device)
        x[:, 0], x[:, 1:] = 0, points
        x = _scramble(x, factor, step, shift, folded)
        zero, x = x[:, :1], x[:, 1:]
        x ^= zero
    else:
        x = _scramble(points.to(dtype), factor, step, shift, folded)
        zero = torch.zeros_like(step[:, :1])
    x &= low
    if n & (n - 1) == 0:
        return x
    row, column = (x >= n * lanes).nonzero(as_tuple=True)
    while len(row):
        image = _scramble(x[row, column, None], factor[row], step[row], shift, folded)
        image = (image ^ zero[row])[:, 0] & low
        x[row, column] = image
        outside = image >= n * lanes
        row, column = row[outside], column[outside]
    return x


def _scramble(x: Tensor, factor: Tensor, step: Tensor, shift: int, folded: int) -> Tensor:
    """Return x [b m] after all rounds; the caller drops the bits above the domain."""
    high = torch.empty_like(x)
    for r, (times, plus) in enumerate(zip(factor.split(1, 1), step.split(1, 1), strict=True)):
        x = torch.mul(x, times, out=None if r == 0 else x)
        x += plus
        torch.bitwise_right_shift(x, shift, out=high)
        high &= folded
        x ^= high
    return x


@dataclass(frozen=True)
class Race:
    """A race of exponentials: item i arrives at Eᵢ/wᵢ, so arrival order is successive sampling.

    The first to arrive is i with probability wᵢ/Σw, the next likewise among the rest: what
    `numpy.random.choice(n, n, replace=False, p=w)` draws. Times are kept as fixed-point log₂
    in the high bits of an int32 whose low bits hold the item, so that one sort of plain
    integers gives the order and ties have one answer on every device.

    Attributes:
        log_time: log₂E at the middle of each logarithmic bin of a uniform number.
        handicap: −log₂wᵢ, with i in the low bits.
    """

    log_time: Int32[Tensor, " z"]
    handicap: Int32[Tensor, " i"]

    @classmethod
    def from_log_weights(cls, log_weights: Float64[Tensor, " i"], device: "torch.device") -> "Race":
        """Return the race of items with these log₂ weights (at most 2¹⁶ items)."""
        item_bits = (len(log_weights) - 1).bit_length()
        edges = torch.arange(_FIRST_BIN, _END_BIN + 1, dtype=torch.int32)
        edges = (edges << _BIN_SHIFT).view(torch.float32).double() * 2.0**-23
        time = torch.log2(-torch.log1p(-(edges[1:] + edges[:-1]) / 2))
        lead = log_weights.max() - log_weights
        scale = ((1 << 31 - item_bits) - 1) / (time.max() - time.min() + lead.max())
        time = ((time - time.min()) * scale).to(torch.int32) << item_bits
        lead = ((lead * scale).to(torch.int32) << item_bits) | torch.arange(
            len(log_weights), dtype=torch.int32
        )
        return cls(time.to(device), lead.to(device))

    def order(self, word: Int64[Tensor, "b i"]) -> Int64[Tensor, "b i"]:
        """Return the items in order of arrival, drawn from the high half of each item's word."""
        # An odd number in ±2²³, exact in a float32. The top bits of its pattern, sign aside,
        # number its bin: 2¹¹ an octave, so that small E, which decide the order, stay apart.
        uniform = (word >> 40 | 1).to(torch.float32).view(torch.int32)
        uniform &= 0x7FFFFFFF
        uniform >>= _BIN_SHIFT
        uniform -= _FIRST_BIN
        arrival = self.log_time.index_select(0, uniform.view(-1)).view(uniform.shape)
        arrival += self.handicap
        if arrival.device.type == "cpu":
            arrival.numpy().sort(axis=1)  # ten times as fast as torch's, which carries indices
        else:
            arrival = arrival.sort(dim=1).values
        item_bits = (len(self.handicap) - 1).bit_length()
        return arrival.bitwise_and_((1 << item_bits) - 1).long()
