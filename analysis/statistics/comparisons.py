"""Which of several differ: p values, corrected for how many there are, and bins that stand out.

Runs that end unsolved are censored: their survival is Kaplan and Meier's, and the log-rank test
compares it.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from analysis.words import count_interval_decimals, percent
from lab.intervals import Z95, bound_share

FLIPS = 2000
"""Random sign flips behind a p value."""
SURE = 0.05
"""The p value below which a change counts."""
SPLITS = 200_000
"""Maximum number of splits into two groups that a permutation test tries: all of ten and ten."""
HALF = 0.5 + 1e-9
"""Share of runs unsolved at the median; the margin absorbs rounding in products of fractions."""


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values after Holm's correction: of p₍₁₎ ≤ … ≤ p₍ₘ₎, max over j ≤ i of (m−j+1) p₍ⱼ₎.

    Source: Holm, Scand. J. Stat. 6 (1979), 65.
    """
    corrected, highest = [1.0] * len(ps), 0.0
    for rank, i in enumerate(np.argsort(ps, kind="stable")):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = highest
    return corrected


def westfall_young(
    changes: Float[np.ndarray, "b n"], rng: np.random.Generator
) -> Float[np.ndarray, " n"]:
    """Return p values of n changes, corrected for picking the lowest of them afterwards.

        z_j = Σ_b c_bj / √(Σ_b c_bj²),   p_j = P(min_i z_i ≤ z_j)

    under random signs of the rows. The signs are the same for all n changes, which keeps their
    correlation. If no change is real, any p < 0.05 occurs in at most 5 % of cases.

    Args:
        changes: n changes in each row; without an effect they are as often up as down.

    Returns:
        p in (0, 1]; with b rows at least about 2^−b, so a few rows cannot show anything.

    Source: Westfall and Young, Resampling-Based Multiple Testing (1993), § 2.
    """
    size = np.sqrt(np.square(changes).sum(0))
    unit = changes / np.where(size > 0, size, 1.0)
    signs = rng.choice((-1.0, 1.0), (FLIPS, len(changes)))
    # Values that differ only by rounding count as equal.
    lowest = (signs @ unit).min(1) - 1e-9
    return (1 + (lowest[:, None] <= unit.sum(0)).sum(0)) / (1 + FLIPS)


def sign_flip_p(gains: Float[np.ndarray, " n"]) -> float:
    """Return the two-sided p of the sign-flip test for a mean of paired differences.

    It is exact up to 16 pairs; for more, 2^16 combinations of signs are drawn.
    """
    from scipy.stats import permutation_test

    if len(gains) < 2:
        return 1.0
    found = permutation_test(
        (gains,),
        np.sum,
        permutation_type="samples",
        n_resamples=2**16,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return min(1.0, float(found.pvalue))


def log_rank_p(
    times: Sequence[float],
    solved: Sequence[bool],
    other_times: Sequence[float],
    other_solved: Sequence[bool],
) -> float:
    """Return the two-sided p of the log-rank test, exact under permutation of the runs.

    The statistic is the first group's observed minus expected events, a sum over its runs of
    δ − H(t), where H is the Nelson–Aalen cumulative hazard of all runs together. The test permutes
    these terms, because the usual χ² is far off with three runs in a group. With more than `SPLITS`
    ways to split the runs, that many are drawn.
    """
    from scipy.stats import permutation_test

    if min(len(times), len(other_times)) < 2:
        return 1.0  # a single run is not a sample
    at, events = np.array([*times, *other_times]), np.array([*solved, *other_solved], dtype=float)
    ends, places = np.unique(at, return_inverse=True)
    at_risk = (at >= ends[:, None]).sum(1)
    hazard = (np.bincount(places, events) / at_risk).cumsum()
    scores = events - hazard[places]
    found = permutation_test(
        (scores[: len(times)], scores[len(times) :]),
        lambda ours, theirs, axis: ours.sum(axis=axis),
        n_resamples=SPLITS,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return min(1.0, float(found.pvalue))


def compute_least_p(runs: int, others: int) -> float:
    """Return the smallest two-sided p that `log_rank_p` can reach with groups of these sizes."""
    return min(1.0, 2 / math.comb(runs + others, runs))


def estimate_curve(
    times: Sequence[float], solved: Sequence[bool]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return the Kaplan–Meier curve: times from 0, and the share unsolved from each on."""
    curve = _fit_survival(times, solved)
    return np.append(0.0, curve.quantiles), np.append(1.0, curve.probabilities)


def estimate_median(
    times: Sequence[float], solved: Sequence[bool]
) -> tuple[float, tuple[float, float]]:
    """Return the Kaplan–Meier median of censored times and its 95 % interval.

    The interval is that of Brookmeyer and Crowley, Biometrics 38 (1982), 29, on a log-log scale.
    """
    curve = _fit_survival(times, solved)
    with warnings.catch_warnings():  # without spread, as where none or all are solved
        warnings.simplefilter("ignore", RuntimeWarning)
        band = curve.confidence_interval(method="log-log")
    # Where none is left, there is no spread either: the end of the curve is that of its band.
    shares = [
        np.where(curve.probabilities > 0, share, 0.0)
        for share in (curve.probabilities, band.low.probabilities, band.high.probabilities)
    ]
    median, low, high = (min(curve.quantiles[share <= HALF], default=math.inf) for share in shares)
    return float(median), (float(low), float(high))


def _fit_survival(times: Sequence[float], solved: Sequence[bool]) -> Any:
    from scipy.stats import CensoredData, ecdf

    ended = np.asarray(solved, dtype=bool)
    return ecdf(CensoredData.right_censored(np.asarray(times, np.float64), ~ended)).sf


@dataclass(frozen=True)
class Bins:
    """Accuracy by bins of a whole number.

    Attributes:
        interval: 95 %, low and high (`bound_share`).
        count: answers in the bin, ≥ 1.
    """

    first: Int[np.ndarray, " n"]
    last: Int[np.ndarray, " n"]
    accuracy: Float[np.ndarray, " n"]
    interval: Float[np.ndarray, "n 2"]
    count: Int[np.ndarray, " n"]


def bin_accuracy(
    number: Int[np.ndarray, " q"],
    edges: Int[np.ndarray, " edges"],
    right: Bool[np.ndarray, " q"],
    rows: Int[np.ndarray, " q"],
    rng: np.random.Generator,
) -> Bins:
    """Compute accuracy by bins edges[i] ≤ number < edges[i + 1]; empty bins are left out."""
    places = np.digitize(number, edges) - 1
    found = np.unique(places)
    inside = [places == place for place in found]
    return Bins(
        first=edges[found],
        last=np.minimum(edges[found + 1] - 1, number.max()),
        accuracy=np.array([right[i].mean() for i in inside]),
        interval=np.array([bound_share(right[i], rows[i], rng) for i in inside]),
        count=np.array([i.sum() for i in inside]),
    )


def describe_contrast(found: Bins, one: str, many: str) -> str:
    """Say between which bins accuracy surely differs most, or that no bin stands out.

    Args:
        one: name of a bin of one number, such as "distance".
        many: its plural, for bins of several numbers.
    """
    names = [
        f"{many if found.last[i] > found.first[i] else one} {format_span(found, i)}"
        for i in range(len(found.first))
    ]
    return describe_extremes(found, names) or f"no {one} stands out"


def describe_extremes(found: Bins, names: Sequence[str]) -> str:
    """Say between which two bins accuracy surely differs most; "" if chance could explain them all.

    The two are chosen among all pairs of bins, so their difference must exceed its interval at 5 %
    divided by the number of pairs (Bonferroni's bound). Few answers may have made another bin's
    accuracy higher or lower still.
    """
    pairs = math.comb(len(found.accuracy), 2)
    if not pairs:
        return ""
    widening = NormalDist().inv_cdf(1 - 0.025 / pairs) / Z95
    below, above = np.abs(found.interval - found.accuracy[:, None]).T
    gap = found.accuracy[:, None] - found.accuracy
    sure = np.where(gap > widening * np.hypot(below[:, None], above), gap, 0.0)
    if not sure.any():
        return ""
    best, worst = map(int, np.unravel_index(sure.argmax(), sure.shape))
    most, least = float(found.accuracy[best]), float(found.accuracy[worst])
    decimals = count_interval_decimals(least, most)
    ends = [
        f"{percent(share, decimals)} at {names[i]}" for share, i in ((most, best), (least, worst))
    ]
    return f"{ends[0]} against {ends[1]}"


def format_span(found: Bins, i: int) -> str:
    """Format the numbers of a bin: "3" or "4–7"."""
    first, last = found.first[i], found.last[i]
    return f"{first}" if first == last else f"{first}–{last}"
