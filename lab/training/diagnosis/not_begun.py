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
SURE_FALL, LEAST_FALL = 3.0, 5e-4
"""Standard errors, and nats, by which the loss must fall: less than these nats is printed as 0."""


def look(failed: FailedRun, found: Answers) -> Look:
    """Look whether the model answers no better than the best rule that needs no recall."""
    low, high = found.interval
    evidence = {
        "accuracy": found.accuracy,
        "interval": [low, high],
        "plateau": found.plateau,
    }
    named = found.rule if found.rule == "chance" else f"“{found.rule}”"
    taken = len(failed.rows)
    place = (
        f"after {taken:,} step{'s' * (taken != 1)}, accuracy on {found.rows:,} validation rows is "
        f"{found.accuracy:.3f} ({low:.3f} … {high:.3f}), and {named}, which needs no recall, "
        f"reaches {found.plateau:.3f}"
    )
    if low > found.plateau:
        return Look(False, place, evidence)
    says = [place]
    if found.outranks is not None and found.outranks_interval is not None:
        least, most = found.outranks_interval
        evidence |= {"outranks": found.outranks, "outranks interval": [least, most]}
        sure = found.outranks - 0.5 > SURE * (found.outranks - least)
        than_guessing = "more often than by guessing" if sure else "which could be a guess"
        says.append(
            f"The right answer outranks another token of its row {100 * found.outranks:.1f} % of "
            f"the time ({100 * least:.1f} % … {100 * most:.1f} %), {than_guessing}"
        )
    trend = _fit_trend(failed)
    if trend is not None:
        change, error, steps = trend
        evidence |= {"change of loss": change, "standard error": error, "over steps": steps}
        falls = ""
        if change < -max(SURE_FALL * error, LEAST_FALL):
            falls = (
                ", so more steps may be all it needs"
                if high >= found.plateau
                else ", but this promises no recall: it has yet to learn what needs none"
            )
        says.append(
            f"Over the last {steps:,} steps the loss changes by {change:+.3f} ± {error:.3f} "
            f"nats{falls}"
        )
    return Look(True, ". ".join(says), evidence)


def _fit_trend(failed: FailedRun) -> tuple[float, float, int] | None:
    """Return how a line through the later half's losses changes, its error, and its steps.

    Losses are fp32, so the error is never below their rounding, and that of the fit is not taken
    for a fall.
    """
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
    span = rows[-1]["step"] - rows[0]["step"]
    error = span * math.sqrt((rest**2).sum() / (PARTS - 2) / spread)
    rounding = float(np.finfo(np.float32).eps * np.abs(losses).max())
    return span * float(slope), max(error, rounding), span
