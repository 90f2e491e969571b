"""Survival analysis of the steps until a run is solved; a run that ends unsolved is censored."""

import importlib.util
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

Alternative = Literal["two-sided", "greater"]
SPLITS = 200_000
"""Maximum number of splits into two groups that a permutation test tries: all of ten and ten."""
HALF = 0.5 + 1e-9
"""Share of runs unsolved at the median; the margin absorbs rounding in products of fractions."""


class MissingLibraryError(ValueError):
    """A library that this analysis needs is not installed."""


def check_installed() -> None:
    """Check that the library for survival analysis is installed.

    Raises:
        MissingLibraryError: when it is not installed.
    """
    if importlib.util.find_spec("lifelines") is None:
        raise MissingLibraryError(
            "statistics of sweeps need lifelines, which is not installed: pip install "
            "'lifelines>=0.30' (or the extra wonderful-lab[studies])"
        )


def estimate_curve(
    times: Sequence[float], solved: Sequence[bool]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return the Kaplan–Meier curve: times from 0, and the share unsolved from each on."""
    from lifelines import KaplanMeierFitter

    curve = KaplanMeierFitter().fit(times, solved).survival_function_
    return curve.index.to_numpy(dtype=float), curve.to_numpy(dtype=float).ravel()


def estimate_median(
    times: Sequence[float], solved: Sequence[bool]
) -> tuple[float, tuple[float, float]]:
    """Return the Kaplan–Meier median of censored times and its 95 % interval."""
    from lifelines import KaplanMeierFitter
    from lifelines.utils import qth_survival_times

    curve = KaplanMeierFitter().fit(times, solved)
    ends = [curve.survival_function_, curve.confidence_interval_]
    median, low, high = (
        float(end) for at in ends for end in np.ravel(qth_survival_times(HALF, at))
    )
    return median, (low, high)


def log_rank_p(
    times: Sequence[float],
    solved: Sequence[bool],
    other_times: Sequence[float],
    other_solved: Sequence[bool],
    alternative: Alternative = "two-sided",
) -> float:
    """Return the p of the log-rank test, exact under permutation of the runs.

    With the alternative "greater", it is one-sided: the first group is solved sooner.

    The statistic is the first group's observed minus expected events, a sum over its runs of
    δ − H(t), where H is the Nelson–Aalen cumulative hazard of all runs together. The test permutes
    these terms, because the usual χ² is far off with three runs in a group.
    """
    from lifelines import NelsonAalenFitter

    if min(len(times), len(other_times)) < 2:
        return 1.0  # a single run is not a sample
    at, events = np.array([*times, *other_times]), np.array([*solved, *other_solved], dtype=float)
    hazard = NelsonAalenFitter(nelson_aalen_smoothing=False).fit(at, events)
    scores = events - hazard.cumulative_hazard_at_times(at).to_numpy()
    return permutation_p(scores[: len(times)], scores[len(times) :], alternative)


def permutation_p(
    ours: Sequence[float] | Float[np.ndarray, " n"],
    theirs: Sequence[float] | Float[np.ndarray, " m"],
    alternative: Alternative = "two-sided",
) -> float:
    """Return the p that a group's sum differs from, or is greater than, that of random groups.

    It is exact; with more than `SPLITS` ways to split the values, that many are drawn.
    """
    from scipy.stats import permutation_test

    if min(len(ours), len(theirs)) < 2:
        return 1.0  # a single run is not a sample
    found = permutation_test(
        (np.asarray(ours), np.asarray(theirs)),
        lambda ours, theirs, axis: ours.sum(axis=axis),
        n_resamples=SPLITS,
        vectorized=True,
        alternative=alternative,
        rng=np.random.default_rng(0),
    )
    return min(1.0, float(found.pvalue))


def compute_least_p(runs: int, others: int) -> float:
    """Return the smallest two-sided p that `log_rank_p` can reach with groups of these sizes."""
    return min(1.0, 2 / math.comb(runs + others, runs))
