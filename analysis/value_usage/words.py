"""Which of its values does inner function attention use, for what, and does it matter which?"""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analysis.base import NotApplicableError, Subject, Words
from analysis.statistics.estimates import SURE
from analysis.value_usage import figures as value_figures
from analysis.value_usage.choices import (
    Dependence,
    Past,
    Usage,
    choices,
    history,
    usage,
    value_layers,
)
from analysis.value_usage.figures import LAYERS, LINES
from analysis.value_usage.swaps import Swap, Swaps, measure_swaps
from analysis.words import percent

TITLE = "Which values inner function attention uses"
NAMED = 3
"""Most layers that a sentence names."""


@dataclass(frozen=True)
class Uses:
    """How every layer uses its values."""

    layers: tuple[Usage, ...]
    role_names: tuple[str, ...]


def measure(subject: Subject) -> list[Uses | Past | Swaps]:
    """Return the use of values by layer, over training where a run tells, and what swaps do.

    Raises:
        NotApplicableError: where no block looks values up.
    """
    layers = value_layers(subject.model)
    if not layers:
        raise NotApplicableError("no block looks its values up: none is inner function attention")
    rng = np.random.default_rng(subject.seed)
    roles, names = subject.batch.roles.cpu().numpy(), subject.task.role_names
    met = choices(subject.model, subject.batch)
    uses = [usage(i, layers[i], met[i], roles, len(names), rng) for i in layers]
    past = []
    if subject.run is not None and len(subject.run.list_steps()) > 1:
        past = history(subject.run, subject.batch, rng)
    swaps = measure_swaps(subject, {layer.layer: layer.shares for layer in uses})
    return [Uses(tuple(uses), names), *past, swaps]


def describe(result: Uses | Past | Swaps) -> Words:
    """Put a result in words."""
    if isinstance(result, Uses):
        return _uses_in_words(result)
    if isinstance(result, Past):
        return _past_in_words(result)
    return _swaps_in_words(result)


def draw(result: Uses | Past | Swaps) -> go.Figure | None:
    """Draw a result."""
    if isinstance(result, Uses):
        return value_figures.use(result.layers, result.role_names)
    if isinstance(result, Past):
        return value_figures.over_training(result)
    return value_figures.swapped(result.swaps, result.role_names)


def _uses_in_words(uses: Uses) -> Words:
    title = "Share of tokens that choose each value, by role"
    rows = [_use(layer) for layer in uses.layers[:NAMED]]
    says = f"{'; '.join(rows)}.".replace("layer", "Layer", 1)
    reading = (
        "A row of a map sums to the values a token takes. e^H: as many values, used evenly, are "
        "as diverse. I: nats that the role tells of the value, of the lesser of their entropies; "
        "with it the 95 % quantile under shuffled roles. "
        + "; ".join(map(_more, uses.layers[:NAMED]))
    )
    if len(uses.layers) > LAYERS:
        reading += f". The first {LAYERS} of {len(uses.layers)} layers are shown"
    return Words(title, says, f"{reading}.", f"Heat map of use by role and value. {says}")


def _use(layer: Usage) -> str:
    n_values = len(layer.shares)
    text = f"layer {layer.layer} uses {layer.used} of {n_values} values (e^H {layer.effective:.2f})"
    if layer.ties == 1:
        return f"{text}: the scores of every token tie"
    if layer.used == 1:
        return text
    if layer.role.bound == 0:
        return f"{text}; all tokens have the same role"
    verb = "depends on" if layer.role.shows else "shows no dependence on"
    return f"{text}, and the choice {verb} the role ({_information(layer.role)})"


def _information(of: Dependence) -> str:
    return f"I = {of.information:.3f} of {of.bound:.3f} nats, shuffled {of.null_high:.3f}"


def _more(layer: Usage) -> str:
    text = (
        f"layer {layer.layer}: KL to uniform {layer.kl:.2f} nats, Gini {layer.gini:.2f}, "
        f"position band {_information(layer.band)}, corrected I(value; role) "
        f"{layer.role.corrected:.3f}"
    )
    if not math.isnan(layer.margins[2]):
        text += f", median margin {layer.margins[2]:.2g}, ties {percent(layer.ties)}"
    return text


def _past_in_words(past: Past) -> Words:
    title = f"Layer {past.layer} · use of values over training"
    n_values = past.shares.shape[1]
    says = (
        f"At step {past.steps[0]:,} {past.used[0]} of {n_values} values are used"
        f"{', all keys zero and every score tied' if past.zero_keys else ''} "
        f"(e^H {past.effective[0]:.2f}), at step {past.steps[-1]:,} {past.used[-1]} "
        f"(e^H {past.effective[-1]:.2f})"
    )
    if past.used.min() == past.used.max():
        says += f", and {past.used[0]} at every step between"
    elif past.used[0] < past.used.max():
        first = int(np.argmax(past.used > past.used[0]))
        says += f"; more than at first by step {past.steps[first]:,}"
    says += f"; {_churn(past)}."
    reading = (
        "The same rows at every step, which are spaced as log₂(step + 1). Dealt at random: the "
        "share that would change were the later choices dealt out among the tokens. Whiskers: 95 % "
        "intervals by resampling rows."
    )
    if n_values > LINES:
        reading += f" The {LINES} values that are ever used most are shown."
    return Words(title, says, reading, f"Lines of use, evenness and churn by step. {says}")


def _churn(past: Past) -> str:
    """Say how many tokens change at last, beside what choices that know no token would do."""
    low, high = past.churn_interval[-1]
    interval = "one row: no interval" if math.isnan(low) else f"[{percent(low)}, {percent(high)}]"
    return (
        f"from step {past.steps[-2]:,} to {past.steps[-1]:,} {percent(float(past.churn[-1]))} of "
        f"the tokens change ({interval}; dealt at random {percent(float(past.churn_dealt[-1]))})"
    )


def _swaps_in_words(swaps: Swaps) -> Words:
    title = "Change of accuracy when values are forced"
    placebo = (
        "Forcing what is chosen already changes nothing."
        if swaps.placebo == 0
        else f"Forcing what is chosen already moves a hidden state by {swaps.placebo:.2g}."
    )
    seen = [swap for swap in swaps.swaps if swap.change.value < 0 and swap.p < SURE]
    right, n = swaps.accuracy, len(swaps.swaps)
    # NaN, the interval of a single row, is not above chance either.
    if not right.low > right.chance:
        says = (
            f"Of the answers {percent(right.value)} are right, not seen to be above chance "
            f"({percent(right.chance)}): swaps cannot tell which values matter."
        )
    elif seen:
        worst = min(seen, key=lambda swap: swap.change.value)
        says = f"{_swap(worst, swaps.role_names)} costs most, {_points(worst)} (p {worst.p:.2g}, "
        says += f"the worst of {n})"
        if worst.value is not None:
            dealt = next(s for s in swaps.swaps if s.layer == worst.layer and s.value is None)
            says += f"; dealing its choices out at random {_points(dealt)}"
        says += "."
    else:
        least = min(swap.p for swap in swaps.swaps)
        says = f"None of {n} swaps is seen to cost accuracy (least p {least:.2g})."
    reading = (
        f"The accuracy is {percent(swaps.accuracy.value)} on these rows (chance "
        f"{percent(swaps.accuracy.chance)}); whiskers are 95 % intervals by resampling rows, "
        "each on its own; p is the share of flips of the rows' signs in which the worst of all "
        f"swaps costs as much, seen below {SURE}. A "
        f"forced value takes over the score, and so the weight, of the one it replaces. {placebo}"
    )
    if swaps.left_out:
        layers = sorted({swap.layer for swap in swaps.swaps})
        reading += f" Forced are the values used most, up to {swaps.forced} a layer, in "
        reading += f"{', '.join(f'layer {layer}' for layer in layers)}."
    return Words(title, f"{says}", reading, f"Dots of accuracy change by value. {says}")


def _swap(swap: Swap, roles: tuple[str, ...]) -> str:
    if swap.value is None:
        return f"Dealing layer {swap.layer}'s choices out at random"
    group = "every token" if swap.role is None else f"the tokens of role {roles[swap.role]}"
    return f"Forcing value {swap.value} on {group} of layer {swap.layer}"


def _points(swap: Swap) -> str:
    change = swap.change
    return f"{100 * change.value:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
