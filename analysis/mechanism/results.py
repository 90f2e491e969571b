"""How does it recall? Interventions on pairs that exchange their keys, and what they add up to.

In a clean row a query for key k has the right answer v. In the corrupt row k and another pair's
key have changed places, so that the right answer is the other value: of all tokens that the answer
hangs on only the two keys differ, and a value's position differs from the clean one only by what it
has gathered about its key. `swapped_keys` makes such rows, `effects` measures.

The label, from most to least basic:

    undecided    it is not sure that more than a fifth of the answers follow keys or positions; or
                 an interval below reaches over a threshold, or a placebo does what only the
                 intervention should
    positional   of the answers that follow one of them, two thirds or more follow the position
    induction    some depth between two blocks, 0 < depth < L, has the answer at the value: the
                 clean residual at the values' positions alone restores two thirds or more
    direct       no depth has: at every one the values restore at most a third, and either the
                 keys or the queries alone restore two thirds or more. A mixer has read key and
                 value in one step. Of more than nine such depths nine are looked at. Where there
                 is none, the model being one block, exchanging the two values in its mixer takes
                 two thirds of the answer or more with them
    mixed        between the thirds: answers that follow keys and positions both, or at its best
                 depth the values restore more than a third and less than two

What an answer follows is in `analysis.mechanism.cues`. Every bound is one end of a 95 % interval.
"""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from analysis.base import NotApplicableError, Subject, Words
from analysis.links import has_pairs
from analysis.mechanism import components
from analysis.mechanism.components import COMPONENT_SITES, Components
from analysis.mechanism.cues import Cues, Measured, cues
from analysis.mechanism.draw_components import components as draw_components
from analysis.mechanism.effects import ARMS, SITES, Edited, Restored, baseline, edit, restore
from analysis.mechanism.swapped_keys import couples
from analysis.plots import style
from analysis.statistics.intervals import bootstrap
from analysis.words import percent

TITLE = "How does it recall?"
ROW_TOKENS = 16_384
"""Tokens of the rows that are looked at, in blocks: deeper models are shown fewer."""
MOST_ROWS = 64
FEWEST_ROWS = 8
ENOUGH, LITTLE, SOME = 2 / 3, 1 / 3, 1 / 5
"""The label's thresholds."""
SPOKEN: dict[str, str] = dict(
    zip(SITES, ("keys", "values", "queries", "all else", "as many others"), strict=True)
)
"""What the sites are called in a sentence."""


@dataclass(frozen=True)
class Mechanism:
    """How a model recalls.

    Attributes:
        label: induction, direct, positional, mixed or undecided.
        reason: why, in a clause.
        evidence: the numbers behind it, the decisive ones.
        follows_key: share of answers that follow the key, in [0, 1].
        follows_position: share that follow the position.
        restored: the residual stream restored by depth and site; None where exchanging keys does
            not change the margin, so that there is nothing to restore.
        rows: of the batch.
    """

    label: str
    reason: str
    evidence: tuple[Measured, ...]
    follows_key: Measured
    follows_position: Measured
    restored: Restored | None
    rows: int


def measure(subject: Subject) -> list[Mechanism | Edited | Components]:
    """Return the mechanism, what editing mixers leaves of recall, and what components carry.

    Raises:
        NotApplicableError: for a task whose rows store no pairs, or a single one, or whose
            answers do not change places with the keys.
    """
    if not has_pairs(subject.batch):
        raise NotApplicableError("the task's rows store no pairs")
    seq_len, n_layers = subject.batch.inputs.shape[1], len(subject.model.blocks)
    wanted = ROW_TOKENS * 2 // (seq_len * max(2, n_layers))
    batch = subject.batch[slice(0, min(MOST_ROWS, max(FEWEST_ROWS, wanted)))]
    rng = np.random.default_rng(subject.seed)
    pairs = couples(subject.task, batch, rng)
    if pairs is None:
        raise NotApplicableError("no row stores two pairs, whose keys could be exchanged")
    if not pairs.valid.any():
        raise NotApplicableError("the answers do not change places when keys do")
    found = cues(subject, pairs.clean, rng)
    known = baseline(subject.model, pairs)
    # As sums over rows; where keys do not move the margin, shares of that move mean nothing.
    moved = known.sums(known.clean)[:, 1:]
    answers_move = bootstrap(moved, rng)[0] > 0
    restored = restore(subject.model, pairs, known, rng) if answers_move else None
    edited = edit(subject.model, pairs, known, rng) if answers_move else None
    label, reason, evidence = classify(found, restored, edited)
    mechanism = Mechanism(
        label, reason, evidence, found.key, found.position, restored, len(pairs.query)
    )
    results: list[Mechanism | Edited | Components] = [mechanism]
    if edited is not None:
        results.append(edited)
    if answers_move:
        results.append(components.measure_components(subject.model, pairs, known, rng))
    return results


def classify(
    found: Cues, restored: Restored | None, edited: Edited | None
) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence; the module says what each label means."""
    told: tuple[Measured, ...] = (found.key, found.position)
    label, reason = "undecided", "exchanging two keys does not move the margin for sure"
    if restored is not None:
        label, reason, carriers = _carrier(restored, edited)
        told += carriers
    of_either = found.of_either
    if not found.either.interval[0] > SOME:
        return "undecided", "too few answers follow either key or position", told
    if of_either.interval[0] >= ENOUGH:
        return "positional", "the answer stays with its position when keys change places", told
    if of_either.interval[0] > LITTLE and of_either.interval[1] < ENOUGH:
        return "mixed", "some answers follow the key, others the position", told
    if not of_either.interval[1] <= LITTLE:
        return "undecided", "whether answers follow the key or the position is not sure", told
    return label, reason, told


def _in_one_block(edited: Edited | None) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence where there is no depth to look at."""
    if edited is None:
        reason = "one block has no depth to look at, and its mixer no matrix to edit"
        return "undecided", reason, ()

    def left(name: str, share: np.ndarray, ends: np.ndarray) -> Measured:
        low, high = ends[-1, 0]
        return Measured(
            f"left with {name} exchanged", float(share[-1, 0]), (float(low), float(high))
        )

    values = left("values", edited.left, edited.interval)
    others = left("other positions", edited.placebo, edited.placebo_interval)
    if values.interval[1] <= LITTLE and others.interval[0] >= ENOUGH:
        return (
            "direct",
            "the one block reads each value by its key, where it stands",
            (values, others),
        )
    reason = "one block has no depth to look at, and exchanging values does not surely take the "
    return "undecided", f"{reason}answer with them", (values, others)


def _carrier(restored: Restored, edited: Edited | None) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence of answers that follow the key: who carries it."""
    inner = range(1, len(restored.depths) - 1)
    if not inner:
        return _in_one_block(edited)

    def at(site: str, i: int) -> Measured:
        place, j = f"{site} restored after block {restored.depths[i] - 1}", SITES.index(site)
        low, high = restored.interval[j, i]
        return Measured(place, float(restored.share[j, i]), (float(low), float(high)))

    best = max(inner, key=lambda i: restored.share[SITES.index("value"), i])
    value, placebo = at("value", best), at("placebo", best)
    others = [
        max((at("key", i), at("query", i)), key=lambda found: found.interval[0]) for i in inner
    ]
    told = (value, placebo, at("key", best), at("query", best), at("elsewhere", best))
    between = int(restored.depths[-1]) - 1
    depths = (
        "at any depth"
        if len(inner) == between
        else f"at the {len(inner)} of {between} depths tried"
    )
    if not placebo.interval[1] <= LITTLE:
        return "undecided", "as many other positions restore the answer too", told
    if value.interval[0] >= ENOUGH:
        return "induction", "the value's position has gathered its key, and that is read", told
    if value.interval[0] > LITTLE and value.interval[1] < ENOUGH:
        return "mixed", "the value's position carries its key in part", told
    if not value.interval[1] <= LITTLE:
        return "undecided", "how much the value's position carries is not sure", told
    if all(other.interval[0] >= ENOUGH for other in others):
        return "direct", f"no value's position carries its key {depths}", told
    return "undecided", "no single position carries the answer at every depth", told


def describe(result: Mechanism | Edited | Components) -> Words:
    """Put the mechanism, what editing leaves, or what components carry in words."""
    if isinstance(result, Components):
        return _components_in_words(result)
    return _mechanism_in_words(result) if isinstance(result, Mechanism) else _edits_in_words(result)


def _components_in_words(found: Components) -> Words:
    title = f"Which component carries the answer, {found.queries} queries of {found.rows} rows"

    def named(n: int, s: int) -> str:
        low, high = found.interval[n, s]
        return (
            f"layer {found.layers[n]}'s {found.components[n]} at the "
            f"{SPOKEN[COMPONENT_SITES[s]]} {_share(found.share[n, s])} "
            f"({_share(low)} to {_share(high)}; placebo {_share(found.share[n, -1])})"
        )

    shown = components.carriers(found)
    if shown:
        says = f"By itself restores the answer: {'; '.join(named(n, s) for n, s in shown[:4])}"
        says += f"; and {len(shown) - 4} more." if len(shown) > 4 else "."
    else:
        real = np.nan_to_num(found.share[:, :-1], nan=-np.inf)
        n, s = np.unravel_index(int(real.argmax()), real.shape)
        says = f"No single component surely restores a third: at most, {named(int(n), int(s))}."
    reading = (
        "What one mixer or state transform of the clean row adds to the residual stream is put "
        "into rows in which pairs exchanged keys, at one kind of position. 0: the answer stays "
        "the corrupt row's; 1: it is the clean row's again. Bold: the 95 % interval over rows is "
        "off 0. Placebo: as many other positions. A chain of components shows one link in each."
    )
    if len(set(found.layers.tolist())) < found.n_layers:
        reading += f" Of {found.n_layers} layers some are left out."
    return Words(title, says, reading, f"Heat map of restored share by component and site. {says}")


def _mechanism_in_words(found: Mechanism) -> Words:
    title = f"Mechanism: {found.label}"
    says = f"{found.label.capitalize()}: {found.reason}. "
    told = {measured.name: measured for measured in found.evidence}
    carried = [measured for name, measured in told.items() if "restored" in name]
    exchanged = [measured for name, measured in told.items() if "exchanged" in name]
    if carried:
        says += f"{_carried(carried)}; "
    elif exchanged:
        parts = [
            f"{measured.name} {_share(measured.value)} ({_share(measured.interval[0])} to "
            f"{_share(measured.interval[1])})"
            for measured in exchanged
        ]
        says += f"Share of the answer {', '.join(parts)}; "
    key, position = found.follows_key, found.follows_position
    says += (
        f"{percent(key.value)} of answers follow the key, {percent(position.value)} the position."
    )
    reading = (
        "Clean residuals are put into rows in which pairs exchanged keys. 0: the answer stays the "
        "corrupt row's; 1: it is the clean row's again. Bars are 95 % over rows. The ends are so "
        "by construction: first only key tokens differ, last only the query is read."
    )
    if found.restored is None:
        return Words(title, says, "", says)
    queries = found.restored.queries
    title += f" · residual stream restored by position, {queries} queries of {found.rows} rows"
    return Words(title, says, reading, f"Lines of restored share by depth, one a site. {says}")


def _carried(evidence: list[Measured]) -> str:
    """Say what restoring each site gives, at the depth that decides."""
    shares = []
    for measured in evidence:
        low, high = measured.interval
        site = measured.name.partition(" ")[0]
        ends = f" ({_share(low)} to {_share(high)})" if site == "value" else ""
        shares.append(f"{SPOKEN[site]} {_share(measured.value)}{ends}")
    depth = evidence[0].name.partition(" restored ")[2]
    return f"Share of the answer restored {depth}: by {', '.join(shares)}"


def _share(value: float) -> str:
    """Return two digits, and no −0.00."""
    return f"{round(value, 2) + 0.0:.2f}"


def _edits_in_words(found: Edited) -> Words:
    title = f"What is left of recall when a mixer is edited, {found.rows} rows"
    parts = []
    for arm in range(2):
        i = int(found.left[arm].argmin())
        parts.append(
            f"blocking {ARMS[arm]} leaves least in layer {found.layers[i]}, "
            f"{_share(found.left[arm, i])} of the margin (placebo {_share(found.placebo[arm, i])})"
        )
    i = int(found.followed.argmax())
    followed, placebo = (
        percent(float(shares[i])) for shares in (found.followed, found.placebo_followed)
    )
    parts.append(
        f"exchanging two values moves {followed} of answers with them in layer {found.layers[i]} "
        f"(placebo {placebo})"
    )
    says = "; ".join(parts)
    says = f"{says[0].upper()}{says[1:]}."
    reading = (
        "1: nothing happened; ½: the two values cannot be told apart; 0: the other value is "
        "answered. Crosses are placebos: a random earlier position in place of value or key, or "
        "two positions of no pair exchanged. Bars are 95 % over rows."
    )
    return Words(title, says, reading, f"Dots of what is left, by layer and edit. {says}")


def draw(result: Mechanism | Edited | Components) -> go.Figure | None:
    """Draw the restored shares by depth or component, or what editing leaves by layer."""
    if isinstance(result, Components):
        return draw_components(result)
    if isinstance(result, Edited):
        return _draw_edits(result)
    return None if result.restored is None else _draw_restored(result.restored)


def _bars(share: Float[np.ndarray, " n"], ends: Float[np.ndarray, "n 2"]) -> dict[str, object]:
    return {
        "type": "data",
        "symmetric": False,
        "array": np.nan_to_num(np.maximum(0, ends[:, 1] - share)),
        "arrayminus": np.nan_to_num(np.maximum(0, share - ends[:, 0])),
        "thickness": 1.2,
        "width": 4,
    }


def _draw_restored(found: Restored) -> go.Figure:
    """Draw a line a site."""
    fig = style.new_figure(height=360)
    symbols = ("square", "diamond", "circle", "triangle-up", "x")
    names = ("keys", "values", "queries", "all else", "placebo")
    dashes = ("solid", "solid", "solid", "dash", "dot")
    spread = 0.012 * (found.depths[-1] - found.depths[0])
    for i, name in enumerate(names):
        muted = {"color": style.MUTED} if i >= 3 else {}
        fig.add_scatter(
            # Side by side, where lines share a height.
            x=found.depths + spread * (i - 2),
            y=found.share[i],
            mode="lines+markers",
            line={"dash": dashes[i], "width": 2 if i < 3 else 1.3, **muted},
            marker={"symbol": symbols[i], "size": 9 if i < 3 else 8, **muted},
            error_y=_bars(found.share[i], found.interval[i]),
            name=name,
            hovertemplate=f"{name} restored: %{{y:.2f}}<extra></extra>",
        )
    ticks = [f"after block {depth - 1}" if depth else "tokens" for depth in found.depths]
    if len(ticks) > 4:
        ticks = [f"{depth}" for depth in found.depths]
    fig.update_xaxes(
        tickvals=found.depths,
        ticktext=ticks,
        showgrid=False,
        title_text="residual stream, by blocks behind it",
    )
    fig.update_yaxes(title_text="answer restored, share of the margin")
    return fig.update_layout(margin_t=84)


def _draw_edits(found: Edited) -> go.Figure:
    """Draw a line a layer, on it a dot for each edit and a cross for its placebo."""
    fig = style.new_figure(height=150 + 60 * max(2, len(found.layers)))
    for arm, symbol in enumerate(("circle", "square", "diamond")):
        height = np.arange(len(found.layers)) + 0.26 * (arm - 1)
        fig.add_scatter(
            x=found.left[arm],
            y=height,
            mode="markers",
            marker={"symbol": symbol, "size": 9},
            error_x=_bars(found.left[arm], found.interval[arm]),
            name=ARMS[arm] if arm == 2 else f"{ARMS[arm]} blocked",
            hovertemplate=f"{ARMS[arm]}: %{{x:.2f}} left<extra></extra>",
        )
        fig.add_scatter(
            x=found.placebo[arm],
            y=height,
            mode="markers",
            marker={"symbol": "x-thin-open", "size": 8, "color": style.MUTED, "line_width": 1.5},
            error_x=_bars(found.placebo[arm], found.placebo_interval[arm]) | {"color": style.MUTED},
            name="placebo",
            showlegend=arm == 0,
            legendrank=2000,
            hovertemplate=f"placebo of {ARMS[arm]}: %{{x:.2f}} left<extra></extra>",
        )
    fig.update_xaxes(title_text="what is left, share of the margin")
    fig.update_yaxes(
        tickvals=np.arange(len(found.layers)),
        ticktext=[f"layer {layer}" for layer in found.layers],
        range=[len(found.layers) - 0.5, -0.5],
        showgrid=False,
        automargin="left",
    )
    return fig.update_layout(margin_t=96)
