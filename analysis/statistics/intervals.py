"""95 % intervals of measured numbers."""

import math

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from lab.intervals import wilson

MOST_DRAWN = 2**18
"""Rows that are drawn at once, for memory's sake."""


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
