"""Is another learning rate clearly better? A few steps from the last weights, on the same rows."""

import math
import statistics
from copy import deepcopy
from dataclasses import replace
from itertools import islice

from lab.diagnosis.ended import Ended, Look
from lab.train import DivergedError, State, fit, learning_rate, start

FACTORS = (0.1, 1 / 3, 3.0)
"""Other rates that are tried, as multiples of the run's own."""
STEPS = 40
"""Steps at each rate, at most; their second half is compared."""
SHARE = 0.1
"""All of these steps are at most this share of the run's own."""
FEWEST = 20
"""Fewer steps a rate than this tell nothing."""
SECONDS = 60.0
"""What the probe may take, by the run's own steps."""
NATS, ERRORS = 0.1, 3.0
"""Another rate is clearly better if its loss is lower by both, in nats and in standard errors."""


def look(ended: Ended) -> Look:
    """Say whether the run diverged, or a few steps at another learning rate go clearly better."""
    run, state = ended.run, ended.state
    rate = learning_rate(run.train, state.step + 1)
    if ended.stopped == "diverged":
        says = f"training diverged at step {state.step + 1:,}, at a learning rate of {rate:.3g}"
        return Look(True, says, {"step": state.step + 1, "learning_rate": rate})
    rates = 1 + len(FACTORS)
    steps = min(STEPS, int(SHARE * state.step / rates))
    if steps < FEWEST:
        least = math.ceil(FEWEST * rates / SHARE)
        return Look(False, f"other learning rates are tried after {least} steps or more")
    seconds = steps * rates * statistics.median(row["seconds"] for row in ended.rows[-50:])
    if seconds > SECONDS:
        return Look(False, f"trying other learning rates would take {seconds:.0f} s")
    own = _losses(ended, rate, steps)
    half = steps // 2
    evidence = {"learning_rate": rate, "steps": steps, "loss": statistics.fmean(own[half:])}
    best, gained = None, 0.0
    for factor in FACTORS:
        other = _losses(ended, factor * rate, steps)
        gain, error = _gain(own[half:], other[half:])
        evidence[f"gain at {factor * rate:.3g}"] = gain
        evidence[f"standard error at {factor * rate:.3g}"] = error
        if gain is not None and error is not None and gain > max(gained, NATS, ERRORS * error):
            best, gained = factor * rate, gain
    if best is None:
        return Look(
            False, f"no learning rate near the run's {rate:.3g} is clearly better", evidence
        )
    says = (
        f"{steps} steps from the last weights go better at a learning rate of {best:.3g} than at "
        f"the run's {rate:.3g}: the loss is lower by {gained:.2f} nats on the same rows"
    )
    return Look(True, says, evidence | {"better": best, "gain": gained})


def _losses(ended: Ended, rate: float, steps: int) -> list[float]:
    """Return the losses of further steps at a rate, infinite from where they diverge.

    They go on with the rows after the run's last, from copies of its weights and moments.
    """
    train, state = ended.run.train, ended.state
    config = replace(
        train,
        learning_rate=rate,
        schedule="constant",
        warmup_steps=0,
        # No evaluation falls into these steps.
        max_steps=state.step + steps + 1,
        stage_steps=train.stage_steps + steps + 1,
        eval_every=state.step + steps + 2,
    )
    losses = []
    try:
        for row in islice(fit(ended.run.task, _copy(ended), config, state.precision), steps):
            losses.append(row.loss)
    except DivergedError:
        losses += [math.inf] * (steps - len(losses))
    return losses


def _copy(ended: Ended) -> State:
    """Return a state of its own with the run's last weights and moments."""
    state = ended.state
    device = next(state.model.parameters()).device
    copy = start(ended.run.build().to(device), ended.run.train)
    copy.model.load_state_dict(state.model.state_dict())
    for name, optimizer in copy.optimizers.items():
        optimizer.load_state_dict(deepcopy(state.optimizers[name].state_dict()))
    counters = {
        name: value for name, value in vars(state).items() if name not in ("model", "optimizers")
    }
    return replace(copy, **counters)


def _gain(own: list[float], other: list[float]) -> tuple[float | None, float | None]:
    """Return by how much the other losses are lower, and the standard error over the steps."""
    if not all(map(math.isfinite, own + other)):
        return None, None
    apart = [a - b for a, b in zip(own, other, strict=True)]
    return statistics.fmean(apart), statistics.stdev(apart) / math.sqrt(len(apart))
