"""95 % intervals of measured numbers."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped

from lab.intervals import wilson


def bootstrap(
    values: Shaped[np.ndarray, "n ..."],
    rng: np.random.Generator,
    rounds: int = 1000,
    statistic: Callable[[np.ndarray], Any] = np.mean,
    groups: Int[np.ndarray, " n"] | None = None,
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic, by resampling values with replacement.

    Args:
        values: what was measured; one row per value for a statistic of several quantities.
        rng: draws the resamples.
        rounds: resamples; 1000 fix the ends to about a twentieth of the interval's width.
        statistic: maps any number of values to one number; NaN where it is undefined.
        groups: the group of each value, such as its row of the batch. Whole groups are drawn, since
            positions of one row are not independent. None: each value is a group of its own.

    Returns:
        the 2.5 % and 97.5 % quantiles; NaN twice for fewer than two groups, whose spread is
        unknown.

    Source: Efron 1979; for groups Davison and Hinkley 1997, § 3.8.
    """
    if groups is None:
        index = [np.array([i]) for i in range(len(values))]
    else:
        order = np.argsort(groups, kind="stable")
        index = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    if len(index) < 2 or len(values) < 2:
        return math.nan, math.nan
    found = np.empty(rounds)
    for i in range(rounds):
        drawn = rng.integers(len(index), size=len(index))
        # Without groups the draws are the indices, and there may be many.
        again = drawn if groups is None else np.concatenate([index[g] for g in drawn])
        found[i] = statistic(values[again])
    if np.isnan(found).all():
        return math.nan, math.nan
    low, high = np.nanquantile(found, [0.025, 0.975])
    return float(low), float(high)


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
    ends = bootstrap(counts, rng, statistic=lambda drawn: drawn[:, 0].sum() / drawn[:, 1].sum())
    low, high = wilson(share, len(right))
    return float(np.nanmin([low, ends[0]])), float(np.nanmax([high, ends[1]]))
