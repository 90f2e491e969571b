"""Has recall not begun? Then accuracy is that of rules without recall; does the loss still fall?"""

import math

import numpy as np

from lab.training.diagnosis.answers import Answers
from lab.training.diagnosis.failed_run import FailedRun, Look

PARTS = 20
"""Parts of the stage's later half; the slope is fitted to their means, as steps are dependent."""

SURE = 1.68
"""Half a 99.9 % interval over half a 95 % one. Every failed run is asked whether it beats guessing,
and at 95 % one in forty that do not would."""


def look(failed: FailedRun, found: Answers) -> Look:
    """Look whether the model answers no better than the best rule that needs no recall."""
    low, high = found.interval
    evidence = {
        "accuracy": found.accuracy,
        "interval": [low, high],
        "plateau": found.plateau,
    }
    named = found.rule if found.rule == "chance" else f"“{found.rule}”"
    place = (
        f"validation accuracy is {found.accuracy:.3f} ({low:.3f} … {high:.3f}); {named}, "
        f"which needs no recall, reaches {found.plateau:.3f}"
    )
    if low > found.plateau:
        return Look(False, place, evidence)
    says = [place]
    if found.outranks is not None and found.outranks_interval is not None:
        least, most = found.outranks_interval
        evidence |= {"outranks": found.outranks, "outranks interval": [least, most]}
        sure = found.outranks - 0.5 > SURE * (found.outranks - least)
        than_guessing = "more often than" if sure else "not surely more often than"
        says.append(
            f"the right answer outranks another token of its row {found.outranks:.1%} of the time "
            f"({least:.1%} … {most:.1%}), {than_guessing} by guessing"
        )
    trend = _fit_trend(failed)
    if trend is not None:
        slope, error = trend
        evidence |= {"loss a 1,000 steps": slope, "standard error": error}
        says.append(f"the loss changes by {slope:+.3f} ± {error:.3f} nats in 1,000 steps")
    return Look(True, "; ".join(says), evidence)


def _fit_trend(failed: FailedRun) -> tuple[float, float] | None:
    """Return the loss's slope over the stage's later half, per 1,000 steps, and its error."""
    rows = failed.rows[len(failed.rows) // 2 :]
    if len(rows) < 2 * PARTS:
        return None
    steps, losses = (
        np.array([part.mean() for part in np.array_split([row[name] for row in rows], PARTS)])
        for name in ("step", "loss")
    )
    slope, level = np.polyfit(steps, losses, 1)
    rest = losses - slope * steps - level
    spread = ((steps - steps.mean()) ** 2).sum()
    error = math.sqrt((rest**2).sum() / (PARTS - 2) / spread)
    return 1000 * float(slope), 1000 * error
