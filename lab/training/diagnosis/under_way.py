"""Is the run under way? If validation accuracy rises, extrapolate how many rows it still needs."""

import numpy as np
from jaxtyping import Float

from lab.training.diagnosis.answers import Answers
from lab.training.diagnosis.failed_run import FailedRun, Look

FEWEST = 10
"""Minimum number of evaluations from which a rise is estimated."""
RISE, SPREADS = 0.02, 4.0
"""Least rise over those evaluations, in accuracy and in multiples of its spread about the fit.
Successive evaluations have nearly the same weights, so their scatter alone looks like a drift."""
RESAMPLES, PERCENTILES = 1000, (2.5, 97.5)
RECENT = 5
"""Last evaluations whose straight line is extrapolated."""
SPEEDUP, SPREAD = 2.0, 2.0
"""As learning speeds up, runs took half the rows of that line in the median. 95 % took between
1/SPREAD and SPREAD² times the median (LOG.md: 442 moments of 42 stages that were solved)."""
FARTHEST = 1000
"""Limit of the extrapolation, as a multiple of the rows seen."""


def look(failed: FailedRun, found: Answers) -> Look:
    """Look whether accuracy rises, and is above that of rules that need no recall.

    A line in the logarithm of the stage's rows is fitted to the logit of the accuracy, over the
    later half of the stage or the last `FEWEST` evaluations. Whether it rises is decided by a
    bootstrap over evaluations. How many rows are left is extrapolated from the last ones.
    """
    seen = failed.evaluations
    if len(seen) < FEWEST:
        return Look(False, f"the stage has {len(seen)} evaluations, too few to see a rise")
    rows, accuracy = np.array(seen).T
    late = max(FEWEST, int((rows >= rows[-1] / 2).sum()))
    rows, accuracy = rows[-late:], accuracy[-late:]
    slope, level = _fit(rows, accuracy)
    generator = np.random.default_rng(0)
    slopes = [
        _fit(rows[some], accuracy[some])[0]
        for some in generator.integers(late, size=(RESAMPLES, late))
        if np.ptp(rows[some]) > 0
    ]
    low, high = np.percentile(slopes, PERCENTILES)
    fitted = 1 / (1 + np.exp(-level - slope * np.log(rows)))
    rise = float(fitted[-1] - fitted[0])
    spread = float(np.sqrt(((accuracy - fitted) ** 2).sum() / (late - 2)))
    evidence = {
        "evaluations": late,
        "accuracy": float(accuracy[-1]),
        "slope": float(slope),
        "slope interval": [float(low), float(high)],
        "rise": rise,
        "spread": spread,
    }
    risen = low > 0 and rise > max(RISE, SPREADS * spread)
    if not (risen and found.interval[0] > found.plateau):
        return Look(
            False,
            f"over the last {late} evaluations the accuracy changes by {rise:+.3f}",
            evidence,
        )
    if accuracy[-1] >= failed.goal:
        says = (
            f"validation accuracy rose to {accuracy[-1]:.3f}, which is enough for rows of this "
            f"length ({failed.goal:g}), but training ended before they grew"
        )
        return Look(True, says, evidence)
    needed, least, most = extrapolate(rows, accuracy, failed.goal)
    evidence |= {"rows needed": needed, "rows needed interval": [least, most]}
    beyond = "or more" if most >= FARTHEST * rows[-1] else f"… {_round(most)}"
    says = (
        f"validation accuracy rises, to {accuracy[-1]:.3f} so far; at this pace it takes "
        f"about {_round(needed)} more rows ({_round(least)} {beyond}) of this length to reach "
        f"{failed.goal:.2f}"
    )
    return Look(True, says, evidence)


def extrapolate(
    rows: Float[np.ndarray, " n"], accuracy: Float[np.ndarray, " n"], goal: float
) -> tuple[float, float, float]:
    """Return how many more rows reach an accuracy: an estimate, and its 95 % interval.

    While a task is being learned, the logit of the accuracy rises along a line in the rows that
    bends upwards. The last percents may instead come ever more slowly, along a line in the
    logarithm of the rows. The interval reaches to the slower of the two.

    Args:
        rows: seen before each evaluation, rising; at least `FEWEST`.
        accuracy: in each, in [0, 1].
        goal: the accuracy to reach.
    """
    farthest, goal_logit = FARTHEST * float(rows[-1]), float(_logit(np.array(goal)))
    recent = _logit(accuracy[-RECENT:])
    slope = np.polyfit(rows[-RECENT:], recent, 1)[0]
    left = max(0.0, goal_logit - float(recent[-2:].mean()))
    line = left / slope if slope > 0 else farthest
    slope, level = _fit(rows[-FEWEST:], accuracy[-FEWEST:])
    log_rows = (goal_logit - level) / slope if slope > 0 else np.inf
    slow = float(np.exp(min(log_rows, 700.0))) - float(rows[-1])
    estimate = line / SPEEDUP
    ends = estimate, estimate / SPREAD, max(estimate * SPREAD**2, slow)
    needed, least, most = (float(np.clip(end, 0.0, farthest)) for end in ends)
    return needed, least, most


def _fit(rows: Float[np.ndarray, " n"], accuracy: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Return slope and level of the accuracy's logit over log rows."""
    slope, level = np.polyfit(np.log(rows), _logit(accuracy), 1)
    return float(slope), float(level)


def _logit(accuracy: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Return log-odds; finitely many answers cannot tell accuracies near 0 or 1 from these."""
    kept = np.clip(accuracy, 1e-3, 1 - 1e-3)
    return np.log(kept / (1 - kept))


def _round(rows: float) -> str:
    """Return a number of rows to two digits, with separators."""
    return f"{int(float(f'{rows:.2g}')):,}"
