"""Is it under way? Accuracy on validation rows rises, and tells how many rows are still needed."""

import numpy as np

from lab.training.diagnosis.answers import Answers
from lab.training.diagnosis.failed_run import FailedRun, Look

FEWEST = 10
"""Evaluations that a rise is read from, at least."""
RISE, SPREADS = 0.02, 4.0
"""Over those evaluations, at least: in accuracy, and in its spread about the fit. Successive
evaluations are of nearly the same weights, so that their scatter alone looks like a drift."""
RESAMPLES, PERCENTILES = 1000, (2.5, 97.5)
FARTHEST = 1000
"""Times the rows seen: an extrapolation goes no farther."""


def look(failed: FailedRun, found: Answers) -> Look:
    """Say whether accuracy rises, and is above what needs no recall.

    The logit of the accuracy is fitted by a line in the logarithm of the stage's rows, over its
    later half (or over as many evaluations as it takes). The interval is of fits to evaluations
    drawn with replacement.
    """
    seen = failed.evaluations
    if len(seen) < FEWEST:
        return Look(False, f"the stage has {len(seen)} evaluations, too few to tell a rise by")
    rows, accuracy = np.array(seen).T
    late = max(FEWEST, int((rows >= rows[-1] / 2).sum()))
    rows, accuracy = rows[-late:], accuracy[-late:]
    slope, level = _fit(rows, accuracy)
    generator = np.random.default_rng(0)
    fits = [
        _fit(rows[some], accuracy[some])
        for some in generator.integers(late, size=(RESAMPLES, late))
        if np.ptp(rows[some]) > 0
    ]
    low, high = np.percentile([fit[0] for fit in fits], PERCENTILES)
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
    needed = _extrapolate(slope, level, failed.goal, rows[-1])
    least, most = np.percentile(
        [_extrapolate(slope, level, failed.goal, rows[-1]) for slope, level in fits], PERCENTILES
    )
    evidence |= {"rows needed": needed, "rows needed interval": [float(least), float(most)]}
    beyond = "or more" if most >= FARTHEST * rows[-1] else f"… {_round(most)}"
    says = (
        f"validation accuracy rises, to {accuracy[-1]:.2f} so far; at this pace {failed.goal:.2f} "
        f"takes some {_round(needed)} more rows ({_round(least)} {beyond}) at this length"
    )
    return Look(True, says, evidence)


def _fit(rows: np.ndarray, accuracy: np.ndarray) -> tuple[float, float]:
    """Return slope and level of the accuracy's logit over log rows."""
    # What no finite number of answers tells from 0 or 1 has no logit.
    kept = np.clip(accuracy, 1e-3, 1 - 1e-3)
    slope, level = np.polyfit(np.log(rows), np.log(kept / (1 - kept)), 1)
    return float(slope), float(level)


def _extrapolate(slope: float, level: float, goal: float, seen: float) -> float:
    """Return how many rows after those seen reach the goal, at most FARTHEST times as many."""
    if slope <= 0:
        return FARTHEST * seen
    kept = min(goal, 1 - 1e-3)
    log_rows = (np.log(kept / (1 - kept)) - level) / slope
    return float(np.clip(np.exp(min(log_rows, 700.0)) - seen, 0.0, FARTHEST * seen))


def _round(rows: float) -> str:
    """Return a number of rows to two digits, with separators."""
    return f"{int(float(f'{rows:.2g}')):,}"
