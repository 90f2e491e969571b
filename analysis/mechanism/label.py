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

from analysis.base import Finding, Words
from analysis.mechanism.cues import Cues, Measured
from analysis.mechanism.edits import Edited
from analysis.mechanism.effects import SITES, SPOKEN, Restored
from analysis.mechanism.shares import format_share, make_bars
from analysis.plots.style import MUTED, new_figure
from analysis.words import percent

ENOUGH, LITTLE, SOME = 2 / 3, 1 / 3, 1 / 5
"""The label's thresholds."""


@dataclass(frozen=True)
class Mechanism(Finding):
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

    def describe(self) -> Words:
        """Say which mechanism it is, why, and what the answers follow."""
        title = f"Mechanism: {self.label}"
        says = f"{self.label.capitalize()}: {self.reason}. "
        told = {measured.name: measured for measured in self.evidence}
        carried = [measured for name, measured in told.items() if "restored" in name]
        exchanged = [measured for name, measured in told.items() if "exchanged" in name]
        if carried:
            says += f"{_describe_restoring(carried)}; "
        elif exchanged:
            parts = [
                f"{measured.name} {format_share(measured.value)} "
                f"({format_share(measured.interval[0])} to "
                f"{format_share(measured.interval[1])})"
                for measured in exchanged
            ]
            says += f"Share of the answer {', '.join(parts)}; "
        key, position = self.follows_key, self.follows_position
        says += f"{percent(key.value)} of answers follow the key, "
        says += f"{percent(position.value)} the position."
        reading = (
            "Clean residuals are put into rows in which pairs exchanged keys. 0: the "
            "answer stays the "
            "corrupt row's; 1: it is the clean row's again. Bars are 95 % over rows. The "
            "ends are so "
            "by construction: first only key tokens differ, last only the query is read."
        )
        if self.restored is None:
            return Words(title, says, "", says)
        queries = self.restored.queries
        title += f" · residual stream restored by position, {queries} queries of {self.rows} rows"
        return Words(title, says, reading, f"Lines of restored share by depth, one a site. {says}")

    def draw(self) -> go.Figure | None:
        """Draw the restored shares by depth; None where nothing could be restored."""
        return None if self.restored is None else _draw_restored(self.restored)


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


def _describe_restoring(evidence: list[Measured]) -> str:
    """Say what restoring each site gives, at the depth that decides."""
    shares = []
    for measured in evidence:
        low, high = measured.interval
        site = measured.name.partition(" ")[0]
        ends = f" ({format_share(low)} to {format_share(high)})" if site == "value" else ""
        shares.append(f"{SPOKEN[site]} {format_share(measured.value)}{ends}")
    depth = evidence[0].name.partition(" restored ")[2]
    return f"Share of the answer restored {depth}: by {', '.join(shares)}"


def _draw_restored(found: Restored) -> go.Figure:
    """Draw one line per site."""
    fig = new_figure(height=360)
    symbols = ("square", "diamond", "circle", "triangle-up", "x")
    names = ("keys", "values", "queries", "all else", "placebo")
    dashes = ("solid", "solid", "solid", "dash", "dot")
    spread = 0.012 * (found.depths[-1] - found.depths[0])
    for i, name in enumerate(names):
        muted = {"color": MUTED} if i >= 3 else {}
        fig.add_scatter(
            # Side by side, where lines share a height.
            x=found.depths + spread * (i - 2),
            y=found.share[i],
            mode="lines+markers",
            line={"dash": dashes[i], "width": 2 if i < 3 else 1.3, **muted},
            marker={"symbol": symbols[i], "size": 9 if i < 3 else 8, **muted},
            error_y=make_bars(found.share[i], found.interval[i]),
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
