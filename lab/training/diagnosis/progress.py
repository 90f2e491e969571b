"""Is a run under way, so that it needs more rows? Or has recall not begun?

If validation accuracy rises, the rows that it still needs are extrapolated. If accuracy is that of
rules without recall, does the loss still fall?
"""

import math

import numpy as np
from jaxtyping import Float

from lab.training.diagnosis.failed_run import Answers, FailedRun, Look

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
PARTS = 20
"""Parts of the stage's later half; the slope is fitted to their means, as steps are dependent."""

SURE = 1.68
"""Half a 99.9 % interval over half a 95 % one. Every failed run is asked whether it beats guessing,
and at 95 % one in forty that do not would."""
SURE_FALL, LEAST_FALL = 3.0, 5e-4
"""Standard errors, and nats, by which the loss must fall: less than these nats is printed as 0."""


def look_whether_under_way(failed: FailedRun, found: Answers) -> Look:
    """Look whether accuracy rises, and is above that of rules that need no recall.

    A stage too short to show a rise is under way if it is above those rules after shorter rows were
    learned.

    A line in the logarithm of the stage's rows is fitted to the logit of the accuracy, over the
    later half of the stage or the last `FEWEST` evaluations. Whether it rises is decided by a
    bootstrap over evaluations. How many rows are left is extrapolated from the last ones.
    """
    seen = failed.evaluations
    if len(seen) < FEWEST:
        few = f"the stage has {len(seen)} evaluations, too few to see a rise"
        train, steps = failed.run.train, len(failed.rows)
        grown = failed.state.stage > 0 and train.unlearned == "stop"
        if not (grown and found.interval[0] > found.plateau):
            return Look(False, few)
        limit = f" --max-steps {2 * train.max_steps}" * (failed.stopped == "budget")
        says = (
            f"rows of this length came in the last {steps:,} step{'s' * (steps != 1)} alone, after "
            f"shorter ones were learned, and accuracy is {found.accuracy:.3f}, above the "
            f"{found.plateau:.3f} that needs no recall: `{failed.run.resume_command}{limit}` "
            "trains on"
        )
        return Look(True, says, {"steps": steps, "accuracy": found.accuracy})
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


def look_whether_begun(failed: FailedRun, found: Answers) -> Look:
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
        than_guessing = "more often than by guessing" if sure else "which may be luck"
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
