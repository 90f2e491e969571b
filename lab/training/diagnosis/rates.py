"""Is the run outside the window of learning rates that work? Other rates are tried in two ways.

A few steps from the last weights show whether another rate lowers the loss at once. A rate that was
too high from the start leaves weights that recover slowly, so each other rate also starts from the
initial weights, and its loss is compared with that of the whole run.
"""

import math
import statistics
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice

from lab.training.diagnosis.failed_run import FailedRun, Look
from lab.training.loop import (
    DIVERGED_AT,
    DivergedError,
    TrainingState,
    compute_learning_rate,
    fit,
    start,
)
from tasks.base import Schedule

FACTORS = (0.1, 1 / 3, 3.0)
"""The other rates, as multiples of the run's own."""
STEPS, FEWEST = 40, 20
"""Steps at each rate from the last weights, at most and at least; their second half is compared."""
FEWEST_AFRESH = 100
"""Steps at each rate from the first weights, at least."""
SHARE, MOST, SECONDS = 0.1, 1 / 3, 60.0
"""Limits for all these steps: a share of the run's own steps, the most for a run whose loss has
hardly fallen, and their time."""
HARDLY = 0.8
"""A loss has hardly fallen if it is still above this share of what it was in the second half of the
first `FEWEST_AFRESH` steps."""
NATS, ERRORS = 0.1, 3.0
"""Another rate is clearly better if its loss is lower by both, in nats and in standard errors."""


def look(failed: FailedRun) -> Look:
    """Look whether the run diverged, or another learning rate is clearly better."""
    run, state = failed.run, failed.state
    rate = compute_learning_rate(run.train, state.step + 1, state.annealing.share)
    if failed.stopped == "diverged":
        says = f"training diverged at step {state.step + 1:,}, at a learning rate of {rate:.3g}"
        return Look(True, says, {"step": state.step + 1, "learning_rate": rate})
    rates = 1 + len(FACTORS)
    spent, share = int(SHARE * state.step), SHARE
    if _has_hardly_fallen(failed):
        share = MOST
        both = STEPS * rates + FEWEST_AFRESH * len(FACTORS)
        spent = max(spent, min(int(MOST * state.step), both))
    if spent < FEWEST * rates:
        least = math.ceil(FEWEST * rates / share)
        return Look(False, f"other learning rates are tried after {least} steps or more")
    each = statistics.median(row["seconds"] for row in failed.rows[-50:])
    spent = min(spent, int(SECONDS / max(each, 1e-9)))
    if spent < FEWEST * rates:
        return Look(False, f"a step takes {each:.1f} s, too long to try other learning rates")
    steps = min(STEPS, spent // rates)
    found = _try_from_last(failed, rate, steps)
    afresh = (spent - steps * rates) // len(FACTORS)
    if found.claims or afresh < max(FEWEST_AFRESH, 2 * run.train.warmup_steps):
        return found
    # The run's own rate has reached a later stage, or a schedule has made its rows harder.
    if state.stage or any(isinstance(values, Schedule) for values in run.task.options.values()):
        return found
    return _try_afresh(failed, afresh, found)


def _has_hardly_fallen(failed: FailedRun) -> bool:
    losses, half = [row["loss"] for row in failed.rows], FEWEST_AFRESH // 2
    if failed.state.stage or len(losses) < 2 * FEWEST_AFRESH:
        return False
    then = statistics.fmean(losses[half:FEWEST_AFRESH])
    return statistics.fmean(losses[-half:]) > HARDLY * then


def _try_from_last(failed: FailedRun, rate: float, steps: int) -> Look:
    """Compare the rates from the last weights, step by step on the same rows."""
    half = steps // 2
    own = _train_at_rate(failed, _copy_state(failed), rate, steps)[half:]
    evidence = {"learning_rate": rate, "steps": steps, "loss": statistics.fmean(own)}
    found = {}
    for factor in FACTORS:
        other = _train_at_rate(failed, _copy_state(failed), factor * rate, steps)[half:]
        apart = [a - b for a, b in zip(own, other, strict=True)]
        found[factor * rate] = _keep_if_clear(
            statistics.fmean(apart), _compute_standard_error(apart)
        )
        _note(
            evidence, "gain", factor * rate, statistics.fmean(apart), _compute_standard_error(apart)
        )
    best = max(found, key=found.__getitem__)
    if found[best] <= 0:
        says = (
            f"from the last weights, no learning rate near the run's {rate:.3g} is clearly better"
        )
        return Look(False, says, evidence)
    says = (
        f"from the last weights, {steps} steps at a learning rate of {best:.3g} go better than at "
        f"the run's {rate:.3g}: the loss is lower by {found[best]:.2f} nats on the same rows"
    )
    return Look(True, says, evidence | {"better": best})


def _try_afresh(failed: FailedRun, steps: int, before: Look) -> Look:
    """Compare the loss of a few steps from the initial weights with the run's last loss."""
    peak, half = failed.run.train.learning_rate, steps // 2
    own = [row["loss"] for row in failed.rows[-half:]]
    evidence = {**before.evidence, "steps afresh": steps, "last loss": statistics.fmean(own)}
    found = {}
    for factor in FACTORS:
        state = replace(_copy_state(failed, first=True), precision=failed.state.precision)
        other = _train_at_rate(failed, state, factor * peak, steps)[half:]
        gain = statistics.fmean(own) - statistics.fmean(other)
        error = math.hypot(_compute_standard_error(own), _compute_standard_error(other))
        found[factor * peak] = _keep_if_clear(gain, error)
        _note(evidence, "gain afresh", factor * peak, gain, error)
    best = max(found, key=found.__getitem__)
    if found[best] <= 0:
        says = f"{before.says}; from the start, none gets as far in {steps} steps"
        return Look(False, says, evidence)
    says = (
        f"from the start, {steps} steps at a learning rate of {best:.3g} reach a loss lower by "
        f"{found[best]:.2f} nats than the run's last {half}, after {failed.state.step:,} steps at "
        f"{peak:.3g}"
    )
    return Look(True, says, evidence | {"better": best})


def _train_at_rate(failed: FailedRun, state: TrainingState, rate: float, steps: int) -> list[float]:
    """Return the losses of further steps at a rate; after divergence, the bound that defines it."""
    train, stop = failed.run.train, state.step + steps + 1
    config = replace(
        train,
        learning_rate=rate,
        schedule="constant",
        warmup_steps=0 if state.step else train.warmup_steps,
        # No evaluation falls into these steps, and no stage ends.
        max_steps=stop,
        stage_steps=train.stage_steps + stop,
        eval_every=stop + 1,
    )
    # Like --learning-rate, leave the rate of the tables unchanged.
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            if "rate" in group:
                group["rate"] *= train.learning_rate / rate
    losses = []
    try:
        for row in islice(fit(failed.run.task, state, config), steps):
            losses.append(row.loss)
    except DivergedError:
        bound = DIVERGED_AT * max(state.first_loss or 0.0, failed.run.task.blind_loss)
        losses += [bound] * (steps - len(losses))
    return losses


def _copy_state(failed: FailedRun, *, first: bool = False) -> TrainingState:
    """Return a new state with the run's last weights and moments, or with its initial ones."""
    state = failed.state
    device = next(state.model.parameters()).device
    copy = start(failed.run.build().to(device), failed.run.train)
    if first:
        return copy
    copy.model.load_state_dict(state.model.state_dict())
    for name, optimizer in copy.optimizers.items():
        optimizer.load_state_dict(deepcopy(state.optimizers[name].state_dict()))
    return replace(state, model=copy.model, optimizers=copy.optimizers)


def _keep_if_clear(gain: float, error: float) -> float:
    """Return a gain if it is clear, else 0."""
    return gain if gain > max(NATS, ERRORS * error) else 0.0


def _compute_standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean of independent values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _note(evidence: dict, what: str, rate: float, gain: float, error: float) -> None:
    """Add a gain and its error to the evidence."""
    evidence[f"{what} at {rate:.3g}"] = gain
    evidence[f"{what} at {rate:.3g}, standard error"] = error
