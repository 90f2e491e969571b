"""Is the run under way? If validation accuracy rises, extrapolate how many rows it still needs."""

import numpy as np

from lab.training.diagnosis.answers import Answers
from lab.training.diagnosis.failed_run import FailedRun, Look

FEWEST = 10
"""Fewest evaluations from which a rise is estimated."""
RISE, SPREADS = 0.02, 4.0
"""Least rise over those evaluations, in accuracy and in multiples of its spread about the fit.
Successive evaluations have nearly the same weights, so their scatter alone looks like a drift."""
RESAMPLES, PERCENTILES = 1000, (2.5, 97.5)
FARTHEST = 1000
"""Limit of the extrapolation, as a multiple of the rows seen."""


def look(failed: FailedRun, found: Answers) -> Look:
    """Look whether accuracy rises, and is above that of rules that need no recall.

    A line in the logarithm of the stage's rows is fitted to the logit of the accuracy, over the
    later half of the stage or the last `FEWEST` evaluations. Its interval is a bootstrap over
    evaluations.
    """
    seen = failed.evaluations
    if len(seen) < FEWEST:
        return Look(False, f"the stage has {len(seen)} evaluations, too few to see a rise")
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
        f"validation accuracy rises, to {accuracy[-1]:.2f} so far; at this pace it takes "
        f"about {_round(needed)} more rows ({_round(least)} {beyond}) of this length to reach "
        f"{failed.goal:.2f}"
    )
    return Look(True, says, evidence)


def _fit(rows: np.ndarray, accuracy: np.ndarray) -> tuple[float, float]:
    """Return slope and level of the accuracy's logit over log rows."""
    # 0 and 1 have no logit, and finitely many answers cannot tell values near them apart.
    kept = np.clip(accuracy, 1e-3, 1 - 1e-3)
    slope, level = np.polyfit(np.log(rows), np.log(kept / (1 - kept)), 1)
    return float(slope), float(level)


def _extrapolate(slope: float, level: float, goal: float, seen: float) -> float:
    """Return how many more rows reach the goal, at most `FARTHEST` times those seen."""
    if slope <= 0:
        return FARTHEST * seen
    kept = min(goal, 1 - 1e-3)
    log_rows = (np.log(kept / (1 - kept)) - level) / slope
    return float(np.clip(np.exp(min(log_rows, 700.0)) - seen, 0.0, FARTHEST * seen))


def _round(rows: float) -> str:
    """Return a number of rows to two digits, with separators."""
    return f"{int(float(f'{rows:.2g}')):,}"
