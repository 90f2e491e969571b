"""95 % intervals: of shares, of means and ratios over rows, and of means over seeds.

Shares take Wilson's interval. Where answers come in rows, whole rows are resampled, or the number
of independent answers is estimated from them. Means over seeds take Student's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Z95 = 1.959963984540054
"""The normal distribution's 97.5 % point."""
MOST_DRAWN = 2**18
"""Rows that are drawn at once, for memory's sake."""


def wilson(share: float, count: int | float) -> tuple[float, float]:
    """Return the 95 % interval of a share among `count` independent trials.

        (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927), 209.
    """
    square = Z95**2 / count
    middle = share + square / 2
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    # Rounding might exclude the share itself when it is 0 or 1.
    return max(0.0, min(share, low)), min(1.0, max(share, high))


def clustered_wilson(right: Int[Tensor, " b"], scored: Int[Tensor, " b"]) -> tuple[float, float]:
    """Return the 95 % interval of the share of right answers that are clustered in rows.

    Args:
        right: right answers of each row.
        scored: answers of each row.
    """
    counts = RowCounts()
    counts.add(right, scored)
    return counts.find_interval()


@dataclass
class RowCounts:
    """What to know of any number of rows for the share of their answers that are right.

    With h right answers of s in a row, and n = Σs, p = Σh / n over all m rows, the squared error of
    p between rows is m/(m−1) · Σ(h − ps)² / n², where Σ(h − ps)² = Σh² − 2p Σhs + p² Σs².

    Attributes:
        rows: m.
        sums: Σh and Σs.
        products: Σh² and Σhs, Σhs and Σs².
    """

    rows: int = 0
    sums: Int[Tensor, " 2"] = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    products: Int[Tensor, "2 2"] = field(
        default_factory=lambda: torch.zeros(2, 2, dtype=torch.int64)
    )

    def add(self, right: Int[Tensor, " b"], scored: Int[Tensor, " b"]) -> None:
        """Count the right and all answers of each of some rows."""
        both = torch.stack([right, scored])
        self.rows += len(scored)
        self.sums += both.sum(1)
        self.products += (both[:, None] * both).sum(-1)

    @property
    def scored(self) -> int:
        """All answers."""
        return int(self.sums[1])

    @property
    def share(self) -> float:
        """The share of right answers."""
        return int(self.sums[0]) / self.scored

    def find_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the share.

        Answers of one row may be right or wrong together, so this is Wilson's for the effective
        number of independent answers. If all or none are right, it takes them as independent.
        """
        m, (h, n), p = self.rows, self.sums.tolist(), self.share
        spread = p * (1 - p) / n
        if m > 1 and spread > 0:
            # In whole numbers, n² times as much: differences of large floats would be lost.
            (hh, hs), (_, ss) = self.products.tolist()
            between = m * (n**2 * hh - 2 * n * h * hs + h**2 * ss) / ((m - 1) * n**4)
            n = n / max(1.0, between / spread)
        return wilson(p, n)


@dataclass
class RowAmounts:
    """What `RowCounts` is for counts, for amounts of each row: a share of sums, in [0, 1].

    Attributes:
        rows: number of rows.
        sums: Σh and Σs, of what is right of what is asked.
        products: Σh² and Σhs, Σhs and Σs².
    """

    rows: int = 0
    sums: Float[Tensor, " 2"] = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    products: Float[Tensor, "2 2"] = field(
        default_factory=lambda: torch.zeros(2, 2, dtype=torch.float64)
    )

    def add(self, right: Float[Tensor, " b"], asked: Float[Tensor, " b"]) -> None:
        """Add what is right and what is asked of each of some rows."""
        both = torch.stack([right, asked])
        self.rows += len(asked)
        self.sums += both.sum(1)
        self.products += both @ both.T

    @property
    def share(self) -> float:
        """Σh / Σs, or the end of [0, 1] that it is beyond."""
        return clip_share(*self.sums.tolist())

    def find_interval(self) -> tuple[float, float]:
        """Return the normal 95 % interval of the share, by its spread over rows, within [0, 1]."""
        m, (h, n) = self.rows, self.sums.tolist()
        (hh, hs), (_, ss) = self.products.tolist()
        p = h / n if n > 0 else 0.0
        between = m * max(0.0, hh - 2 * p * hs + p**2 * ss) / (max(1, m - 1) * n**2 or 1)
        half = Z95 * math.sqrt(between)
        return clip_share(p - half, 1.0), clip_share(p + half, 1.0)


def clip_share(right: float, asked: float) -> float:
    """Return right / asked, or the end of [0, 1] that it is beyond; 0 where nothing is asked."""
    return min(1.0, max(0.0, right / asked)) if asked > 0 else 0.0


def bootstrap(
    values: Shaped[np.ndarray, "n ..."],
    rng: np.random.Generator,
    rounds: int = 1000,
    groups: Int[np.ndarray, " n"] | None = None,
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a mean, by resampling values with replacement.

    Args:
        values: what was measured.
        rng: draws the resamples.
        rounds: resamples; 1000 fix the ends to about a twentieth of the interval's width.
        groups: the group of each value, such as its row of the batch. Whole groups are drawn, since
            positions of one row are not independent. None: each value is a group of its own.

    Returns:
        the 2.5 % and 97.5 % quantiles; NaN twice for fewer than two groups, whose spread is
        unknown.

    Source: Efron 1979; for groups Davison and Hinkley 1997, § 3.8.
    """
    sums = values.reshape(len(values), -1).mean(1) if len(values) else np.zeros(0)
    sizes = np.ones(len(values))
    if groups is not None:
        _, places = np.unique(groups, return_inverse=True)
        sums, sizes = np.bincount(places, sums), np.bincount(places)
    return bootstrap_ratio(np.stack([sums, sizes], 1), rng, rounds)


def bootstrap_ratio(
    sums: Shaped[np.ndarray, "n 2"], rng: np.random.Generator, rounds: int = 1000
) -> tuple[float, float]:
    """Return the 95 % percentile interval of Σ first / Σ second column, by resampling rows.

    Returns:
        the 2.5 % and 97.5 % quantiles, without resamples whose second sum is 0; NaN twice for fewer
        than two rows.
    """
    if len(sums) < 2:
        return math.nan, math.nan
    over, under = resample_sums(sums, rng, rounds).T
    found = np.divide(over, under, out=np.full(rounds, np.nan), where=under != 0)
    if np.isnan(found).all():
        return math.nan, math.nan
    low, high = np.nanquantile(found, [0.025, 0.975])
    return float(low), float(high)


def resample_sums(
    values: Shaped[np.ndarray, "n k"], rng: np.random.Generator, rounds: int = 1000
) -> Float[np.ndarray, "rounds k"]:
    """Draw n rows with replacement, `rounds` times, and return the sums of each draw."""
    count = len(values)
    at_once = max(1, MOST_DRAWN // count)
    return np.concatenate(
        [
            values[rng.integers(count, size=(min(at_once, rounds - done), count))].sum(
                1, dtype=np.float64
            )
            for done in range(0, rounds, at_once)
        ]
    )


def bound_share(
    right: Bool[np.ndarray, " q"], rows: Int[np.ndarray, " q"], rng: np.random.Generator
) -> tuple[float, float]:
    """Return a 95 % interval of the share of right answers: the outer ends of two intervals.

    Resampling whole rows allows for answers of a row being correlated, but gives 1 … 1 where all
    are right. Wilson's interval allows for few answers, but not for correlation.
    """
    share = float(right.mean())
    # Rows by their counts: the resampled share is a ratio of sums.
    _, places = np.unique(rows, return_inverse=True)
    counts = np.stack([np.bincount(places, right), np.bincount(places)], 1).astype(np.float64)
    ends = bootstrap_ratio(counts, rng)
    low, high = wilson(share, len(right))
    return float(np.nanmin([low, ends[0]])), float(np.nanmax([high, ends[1]]))


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval over rows of the batch, and its value by chance."""

    value: float
    low: float
    high: float
    chance: float

    @property
    def points(self) -> str:
        """A change of a share in points, with its interval: "+1.0 points [+0.5, +1.5]"."""
        value, low, high = (f"{100 * share:+.1f}" for share in (self.value, self.low, self.high))
        ends = "one row: no interval" if math.isnan(self.low) else f"{low}, {high}"
        return f"{value} points [{ends}]"


def estimate_ratio(
    over: Shaped[Tensor, " b"], under: Shaped[Tensor, " b"], chance: float, rng: np.random.Generator
) -> Estimate:
    """Estimate Σ over / Σ under with an interval by resampling rows; rows with NaN are left out."""
    both = torch.stack([over.double(), under.double()], 1).cpu().numpy()
    both = both[~np.isnan(both).any(1)]
    if len(both) > 1 and both[:, 1].any() and not both[:, 0].any():
        # Every resample would be 0.
        return Estimate(0.0, 0.0, 0.0, chance)
    return Estimate(divide_sums(both), *bootstrap_ratio(both, rng), chance)


def divide_sums(both: Float[np.ndarray, "n 2"]) -> float:
    """Return the quotient of the sums of two columns; NaN if the second is 0."""
    over, under = both.sum(0)
    return float(over / under) if under else math.nan


def bound_mean(
    values: Sequence[float],
    rows: Sequence[tuple[float, float]] = (),
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Return an interval, by default of 95 %, of the mean over seeds of a share in [0, 1].

    It is Student's interval of the runs. Where that is narrower than the runs' intervals over rows
    in the mean, as where all runs are right, its ends are those: the outer ends count.

    Args:
        values: the share of each run, one for each seed.
        rows: the interval of each run over other rows of its task.
        confidence: of Student's interval.

    Returns:
        the ends; NaN twice for a single run without an interval. A single run with one has its
        interval over rows, which says nothing of other seeds.

    Departs: percentiles of resampled seeds hold the mean in 73 % of cases with three seeds, where
    Student's interval holds it in 93 % (LOG.md).
    """
    low, high = math.inf, -math.inf
    if rows:
        low, high = (sum(ends) / len(ends) for ends in zip(*rows, strict=True))
    if len(values) > 1:
        ends = bound_by_student(values, confidence)
        low, high = min(low, ends[0]), max(high, ends[1])
    if low > high:
        return math.nan, math.nan
    return max(0.0, low), min(1.0, high)


def bound_by_student(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's interval of a mean; the mean twice where all values are the same, or one."""
    from scipy import stats

    mean = sum(values) / len(values)
    error = stats.sem(values) if len(values) > 1 else 0
    if not error > 0:
        return mean, mean
    low, high = stats.t.interval(confidence, len(values) - 1, mean, error)
    return float(low), float(high)
