"""Which keys do the dynamic masks keep, do they take noise or answers, and do they learn at all?"""

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go

from analysis.base import Words
from analysis.dynamic_mask import figures as mask_figures
from analysis.dynamic_mask.figures import PANELS
from analysis.dynamic_mask.heads import Head
from analysis.dynamic_mask.history import History
from analysis.dynamic_mask.masking import LIGHT
from analysis.dynamic_mask.results import Effect, Kept, Selection, Trajectory, Values, measure
from analysis.statistics.estimates import SURE, Estimate
from analysis.words import percent

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "What the dynamic masks do"
NOTES = {
    "nothing": "does next to nothing",
    "noise": "takes noise",
    "answers": "takes answers",
    "keys": "takes keys",
    "both": "takes noise and answers",
    "neither": "takes neither",
    "undecided": "undecided",
}
"""What stands beside a head."""
NAMED = 3
"""Most heads that a sentence names."""


def describe(result: Values | Selection | Kept | Effect | Trajectory | History) -> Words:
    """Put a result in words."""
    if isinstance(result, Values):
        return _values_in_words(result)
    if isinstance(result, Selection):
        return _selection_in_words(result)
    if isinstance(result, Kept):
        return _kept_in_words(result)
    if isinstance(result, Effect):
        return _effect_in_words(result)
    if isinstance(result, Trajectory):
        return _trajectory_in_words(result)
    return _history_in_words(result)


def _values_in_words(values: Values) -> Words:
    title = "Biases by position and role, means over rows"
    dead = [layer for layer, g in zip(values.layers, values.gradients, strict=True) if g == 0.0]
    widest = int(np.argmin(values.lightest))
    if dead:
        says = f"No gradient reaches the mask of {_layers(dead)}: it is dead, as it began."
    elif values.readings[widest] == "oracle":
        says = "The mask is told which keys to keep; it learns nothing."
    elif values.lightest[widest] > 1 - 1e-6:
        says = "Every key has the same bias, which the softmax cancels: the mask does nothing yet."
    else:
        role_means = values.bias_by_role[widest]
        low, high = int(np.nanargmin(role_means)), int(np.nanargmax(role_means))
        says = (
            f"The {values.readings[widest]} mask reaches furthest in {values.names[widest]}: its "
            f"least favoured key keeps {percent(values.lightest[widest])} of the most favoured "
            "key's weight"
        )
        says += (
            "."
            if low == high
            else (
                f"; by role, biases run from {role_means[low]:.4g} ({values.role_names[low]}) to "
                f"{role_means[high]:.4g} ({values.role_names[high]})."
            )
        )
    reading_ = (
        "A bias is added to every score of its key; the softmax sees differences alone, e^b as a "
        "factor. Whiskers: standard deviation over rows, none for a table."
    )
    if values.width > 1:
        title += f", {values.width} positions a mark"
    reading_ += _shown(len(values.names))
    return Words(title, says, reading_, f"Dots of mask bias by key position and role. {says}")


def _selection_in_words(selection: Selection) -> Words:
    found = selection.heads
    title = "Share of keys kept, by role"
    rows = []
    for head in _most(found, lambda head: 1 - head.kept):
        text = f"{head.name} keeps {percent(head.kept)} of the keys"
        if head.pairs is not None:
            pairs = head.pairs
            text += (
                f", of the stored ones {percent(pairs.recall.value)} (chance "
                f"{percent(pairs.recall.chance)}), and {percent(pairs.precision.value)} of what it "
                f"keeps is stored (chance {percent(pairs.precision.chance)})"
                if head.kept < 1
                else ""
            )
            text += f"; AUROC of its bias {_with_interval(pairs.auroc)}"
            if pairs.auroc.low <= 0.5 <= pairs.auroc.high:
                text += ", no better than chance"
        rows.append(text)
    says = f"{_sentence('; '.join(rows))}."
    reading_ = (
        f"A key is masked for a query where its weight falls below {LIGHT:.0%} of the most "
        "favoured key's, or outside the window. Bars: over all queries and the keys before them; "
        "diamonds: the mean weight beside the most favoured key, which a soft mask lowers alone. "
        "Precision, recall and AUROC (chance 0.5): as the scored queries see the stored pairs; "
        "intervals by resampling rows, of no width where all rows are alike."
    )
    reading_ += _shown(len(found))
    return Words(title, says, reading_, f"Bars of the kept share by role of the key. {says}")


def _kept_in_words(kept: Kept) -> Words:
    rows = []
    for head in _most(kept.heads, lambda head: 1 - head.kept):
        low, high = (
            np.unravel_index(place, head.kept_by_band.shape)
            for place in (np.nanargmin(head.kept_by_band), np.nanargmax(head.kept_by_band))
        )
        ends = [
            f"{percent(float(head.kept_by_band[place]))} ({kept.role_names[place[0]]} at "
            f"{kept.bands[place[1]]}–{kept.bands[place[1] + 1] - 1})"
            for place in (low, high)
        ]
        rows.append(f"{head.name} keeps from {ends[0]} to {ends[1]}")
    says = f"{_sentence('; '.join(rows))}."
    reading_ = (
        "The share of the keys of a role, in a band of positions, that is kept, over all later "
        f"queries; empty where no key has the role.{_shown(len(kept.heads))}"
    )
    alt = f"Heat maps of the kept share by role and band. {says}"
    return Words("Share of keys kept, by role and band of positions", says, reading_, alt)


def _effect_in_words(effect: Effect) -> Words:
    title = "What masking does to the attention on the answer"
    rows = [_verdict(head) for head in _most(effect.heads, lambda head: head.moved)]
    changes = [
        f"{100 * change.value:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}] "
        f"without layer {layer}'s"
        for layer, change in zip(effect.layers, effect.removal, strict=True)
    ]
    most = sorted(changes, key=lambda text: -abs(float(text.split()[0])))[:NAMED]
    says = (
        f"{_sentence('; '.join(rows))}. Of {percent(effect.accuracy.value)} right answers "
        f"(chance {percent(effect.accuracy.chance)}), biases at zero change {', '.join(most)}."
    )
    if harmful := _harmful(effect):
        says += f" So whatever they take, the masks of {_layers(harmful)} do harm."
    reading_ = (
        "A⁰ is the attention of the same queries and keys without bias and window; lost is A⁰'s "
        "mass on masked keys, by chance the share of keys masked. A mask takes noise when the "
        f"answer's value gains by it, and answers too when some of those values are masked; keys "
        "when stored values lose their own key, to which they attend more than evenly without it. "
        f"A layer's masks do harm where the answers gain without them, p < {SURE} with the number "
        "of layers in account. "
        f"{_beyond_in_words(effect)}"
    )
    return Words(title, says, reading_, f"Pairs of dots, a line a head. {says}")


def _harmful(effect: Effect) -> list[int]:
    """Return the layers without whose masks more answers are right."""
    return [layer for layer, p in zip(effect.layers, effect.harm, strict=True) if p < SURE]


def _verdict(head: Head) -> str:
    """Say whether a mask takes noise or answers, and by what numbers."""
    if head.verdict == "nothing":
        return f"{head.name} moves {percent(head.moved)} of the attention: next to nothing"
    if head.pairs is None:
        return f"{head.name} moves {percent(head.moved)} of the attention"
    pairs = head.pairs
    word = {
        "noise": f"{head.name} takes noise: answers get",
        "answers": f"{head.name} takes answers: they get",
        "keys": f"{head.name} takes keys: stored values give their own "
        f"{percent(pairs.key.value)} of their attention, without the mask "
        f"{percent(pairs.key.chance)} (evenly {percent(pairs.key_uniform)}); answers get",
        "both": f"{head.name} takes both noise and answers: answers get",
        "neither": f"{head.name} moves attention among other keys: answers get",
        "undecided": f"in {head.name} it is not decided what the mask takes: answers get",
    }[head.verdict]
    text = (
        f"{word} {percent(pairs.answer.value)} of the attention, without the mask "
        f"{percent(pairs.answer.chance)}"
    )
    if pairs.hidden.value > 0:
        text += f", but {percent(pairs.hidden.value)} of the answers are masked"
    if head.lost.value > 0:
        text += (
            f" (mass lost {percent(head.lost.value)}, chance {percent(head.lost.chance)}, of it on "
            f"answers {percent(pairs.lost_answer.value)}, chance "
            f"{percent(pairs.lost_answer.chance)})"
        )
    return text


def _beyond_in_words(effect: Effect) -> str:
    """Say what the masks are past the length of the rows."""
    past, text = effect.beyond, ""
    if past.entries:
        text = (
            f"Of the {past.entries:,} table entries past these rows "
            f"{percent(past.untouched)} are untouched, a weight of {past.weight:.2g} beside the "
            "most favoured. "
        )
    if past.accuracy is None:
        return f"{text}Rows twice as long were not measured: {past.why}."
    text += (
        f"On rows of {past.seq_len:,} tokens {percent(past.accuracy.value)} are right, "
        f"{percent(past.accuracy.chance)} without masks"
    )
    if past.auroc:
        text += f"; AUROC there {', '.join(f'{a:.2f}' for a in past.auroc[:PANELS])}"
    return f"{text}."


def _trajectory_in_words(trajectory: Trajectory) -> Words:
    what = "table l" if trajectory.table else "mean bias"
    title = f"Masks over training: {what} by step and position"
    if trajectory.width > 1:
        title += f", means of {trajectory.width} positions"
    moved = np.ptp(trajectory.values, axis=0).max(-1)
    i = int(moved.argmax())
    if moved[i] == 0:
        says = "No entry ever moves."
    else:
        of_head, steps = trajectory.values[:, i], trajectory.steps
        far = int(np.ptp(of_head, axis=1).argmax())
        says = f"{_sentence(trajectory.names[i])} moves most: "
        says += " and ".join(
            f"at step {steps[at]:,} positions differ from {of_head[at].min():.3g} to "
            f"{of_head[at].max():.3g}"
            for at in dict.fromkeys((far, len(steps) - 1))
        )
        bands = trajectory.by_band[-1, i]
        says += (
            f"; at the end the means of its {len(bands)} equal bands of positions go from "
            f"{bands.min():.3g} (band {bands.argmin() + 1}) to {bands.max():.3g} "
            f"(band {bands.argmax() + 1})."
        )
    reading_ = (
        "Rows are kept steps, the first below; they lie closer around a jump. "
        + ("A literal or straight-through mask closes where l < ½." if trajectory.table else "")
        + _shown(len(trajectory.names))
    )
    return Words(title, says, reading_, f"Heat map of {what} by training step. {says}")


def _history_in_words(past: History) -> Words:
    title = "How far the masks moved, and the gradient that moves them"
    dead = [
        layer
        for layer, of_layer in zip(past.layers, past.gradients.T, strict=True)
        if (of_layer == 0).all()
    ]
    if len(dead) == len(past.layers):
        says = (
            f"The masks are dead: the gradient is exactly 0 at each of {len(past.steps)} steps, "
            f"and they have moved by {np.nanmax(past.drifts):.2g}."
        )
    else:
        i = int(np.nanargmax(past.drifts[-1]))
        at = int(np.nanargmax(past.gradients[:, i]))
        says = (
            f"The mask of layer {past.layers[i]} moves furthest, by {past.drifts[-1, i]:.2g}; its "
            f"gradient is largest, {past.gradients[at, i]:.2g}, at step {past.steps[at]:,}."
        )
        says += f" That of {_layers(dead)} is dead: its gradient is always 0." if dead else ""
    reading_ = (
        "θ is the table l, or A and dt of a value mask; distances are Euclidean, from the first "
        "step's; the gradient is that of the mean loss in nats at scored positions. Steps are "
        "spaced as log₂(step + 1)."
    )
    return Words(title, says, reading_, f"Lines of drift and gradient by step. {says}")


def draw(result: Values | Selection | Kept | Effect | Trajectory | History) -> go.Figure | None:
    """Draw a result; of many heads those that the masks act on most."""
    if isinstance(result, Values):
        some = _sharpest(result.lightest)
        names = [f"{result.names[i]} · {result.readings[i]}" for i in some]
        bias, spread = result.bias[some], result.spread[some]
        return mask_figures.positions(names, result.role_names, bias, spread, result.width)
    if isinstance(result, Selection):
        found = _open(result)
        names = [f"{head.name} · {head.reading}" for head in found]
        kept = np.stack([head.kept_by_role for head in found])
        weights = np.stack([head.weight_by_role for head in found])
        overall = [head.kept for head in found]
        return mask_figures.bars(names, result.role_names, kept, weights, overall)
    if isinstance(result, Kept):
        found = _open(result)
        kept = np.stack([head.kept_by_band for head in found])
        names = [head.name for head in found]
        return mask_figures.places(names, result.role_names, result.bands, kept)
    if isinstance(result, Effect):
        return _draw_effect(result)
    if isinstance(result, Trajectory):
        some = _sharpest((-np.ptp(result.values, axis=(0, 2))).tolist())
        names = [result.names[i] for i in some]
        values, what = result.values[:, some], "l" if result.table else "bias, nats"
        return mask_figures.maps(names, result.steps, values, result.width, what)
    names = [f"layer {i} · {r}" for i, r in zip(result.layers, result.readings, strict=True)]
    titles = ("‖θ − θ₀‖", "‖∂loss/∂θ‖")
    return mask_figures.curves(names, result.steps, result.drifts, result.gradients, titles)


def _draw_effect(effect: Effect) -> go.Figure | None:
    found = [(head, head.pairs) for head in effect.heads if head.pairs is not None]
    if not found:
        return None
    return mask_figures.dumbbells(
        names=[head.name for head, _ in found],
        without=np.array([pairs.answer.chance for _, pairs in found]),
        masked=np.array([pairs.answer.value for _, pairs in found]),
        ends=np.array([(pairs.answer.low, pairs.answer.high) for _, pairs in found]),
        notes=[
            NOTES[head.verdict] + (", does harm" if head.layer in _harmful(effect) else "")
            for head, _ in found
        ],
    )


def _open(result: Selection | Kept) -> list[Head]:
    """Return the heads that keep least, as many as have a panel."""
    return [result.heads[i] for i in _sharpest([head.kept for head in result.heads])]


def _sharpest(values: Sequence[float]) -> list[int]:
    """Return the indices of the smallest values, as many as have a panel, in their own order."""
    return sorted(np.argsort(values, kind="stable")[:PANELS].tolist())


def _most(found: Sequence[Head], key: Callable[[Head], float]) -> list[Head]:
    """Return the few heads that a sentence names."""
    chosen = sorted(found, key=key, reverse=True)[:NAMED]
    return [head for head in found if head in chosen]


def _layers(layers: Sequence[int]) -> str:
    named = [str(layer) for layer in layers]
    return f"layer {named[0]}" if len(named) == 1 else f"layers {', '.join(named)}"


def _shown(heads: int) -> str:
    return f" The {PANELS} of {heads} heads that act most are shown." if heads > PANELS else ""


def _with_interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
