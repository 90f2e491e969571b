"""How the model recalls: a label for what interventions on pairs that exchange keys show.

In a clean row the query for key k has the right answer v. In the corrupt row, k has changed places
with the key of another pair, so the right answer is the other pair's value. Only the two key tokens
differ between the rows, and the residual stream at a value's position differs only by what it has
gathered about its key. `couples` makes the corrupt rows and measures what an
answer follows, `effects` measures the interventions.

The labels, from the most basic on:

    undecided    it is uncertain that more than a fifth of the answers follow the key or the
                 position; or an interval below includes a threshold; or a placebo has the effect
                 that only the intervention should have
    positional   of the answers that follow the key or the position, at least two thirds follow the
                 position
    induction    at some depth between two blocks, 0 < depth < L, the values' positions carry the
                 answer: their clean residual stream alone restores at least two thirds
    direct       at no such depth do the values' positions carry the answer: they restore at most a
                 third, and either the keys or the queries alone restore at least two thirds, so a
                 mixer has read key and value in one step. At most nine depths are tried. A model
                 of one block has none; there, at least two thirds of the answer must go with the
                 two values when its mixer exchanges them
    mixed        in between: some answers follow the key and others the position, or at its best
                 depth the values restore more than a third and less than two thirds

Where a layer reads values, and gathers their keys, some positions later (`analysis.links.Offsets`),
those positions are meant.

`couples.Followed` defines what an answer follows. Every comparison with a threshold uses an end of
a 95 % interval.
"""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.links import IN_PLACE, Offsets
from analysis.mechanism.couples import Followed, Measured
from analysis.mechanism.effects import SITE_NAMES, SITES, Edited, Restored, format_share
from analysis.plots.style import MUTED, make_whiskers, new_figure
from analysis.words import capitalize, name_place, percent, round_percent

ENOUGH, LITTLE, SOME = 2 / 3, 1 / 3, 1 / 5
"""Thresholds of the labels."""


@dataclass(frozen=True)
class Mechanism(Finding):
    """How a model recalls.

    Attributes:
        label: induction, direct, positional, mixed or undecided.
        reason: why it has this label, in one clause.
        evidence: the numbers that decide the label.
        follows_key: share of answers that follow the key, in [0, 1].
        follows_position: share that follow the position.
        restored: shares restored by depth and site; None if exchanging keys does not surely change
            the margin, so that there is nothing to restore.
        rows: number of rows in the batch.
        offsets: how far after a value it is found, where a convolution moved it.
    """

    label: str
    reason: str
    evidence: tuple[Measured, ...]
    follows_key: Measured
    follows_position: Measured
    restored: Restored | None
    rows: int
    offsets: Offsets = IN_PLACE

    def describe(self) -> Words:
        """State the label, the reason, and what the answers follow."""
        title = f"Mechanism: {self.label}"
        says = f"{self.label.capitalize()}: {self.reason}. "
        by_name = {measured.name: measured for measured in self.evidence}
        carried = [measured for name, measured in by_name.items() if "restored" in name]
        exchanged = [measured for name, measured in by_name.items() if "exchanged" in name]
        if carried:
            says += f"{_describe_restoring(carried, self.offsets.gathered)}; "
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
            "Corrupt rows are clean rows in which pairs exchanged keys. Here the clean residual "
            "stream replaces the corrupt one at some positions. At 0 the answer stays the corrupt "
            "row's; at 1 it is the clean row's again. Bars are 95 % intervals over rows. Both ends "
            "hold by construction: before the first block only the key tokens differ, and after "
            "the last only the query is read."
        )
        gist = self._describe_route()
        if self.restored is None:
            return Words(title, says, "", says, gist=gist)
        queries = self.restored.queries
        title += f" · residual stream restored by position, {queries} queries of {self.rows} rows"
        alt = f"Lines of restored share by depth, one per site. {says}"
        return Words(title, says, reading, alt, gist=gist)

    def _describe_route(self) -> str:
        """Say how the model recalls, and what the placebo does."""
        shares = {found.name.partition(" ")[0]: found.value for found in self.evidence}
        left = {found.name: found.value for found in self.evidence if "exchanged" in found.name}
        gathered = self.offsets.gathered
        restored = name_place(gathered, "the values") if gathered else "the values' positions"
        if self.label == "induction":
            place = name_place(gathered, "each value") if gathered else "each value's position"
            return (
                f"It recalls by induction. {capitalize(place)} gathers its key, and the query "
                f"finds it there. Restoring {restored} alone brings back "
                f"{round_percent(shares['value'])} of the answer. Restoring as many other "
                f"positions, the placebo, brings back {round_percent(shares['placebo'])}."
            )
        if self.label == "direct" and left:
            values, others = left.values()
            exchanged = name_place(self.offsets.get(0)[0], "two values")
            return (
                "It recalls directly. One mixer finds the key and reads the value in one step. "
                f"Exchanging {exchanged} leaves {round_percent(values)} of the answer. Exchanging "
                f"other positions, the placebo, leaves {round_percent(others)}."
            )
        if self.label == "direct":
            return (
                "It recalls directly. One mixer finds the key and reads the value in one step. "
                f"Restoring {restored} brings back at most "
                f"{round_percent(shares['value'])} of the answer at the depths tried. Restoring as "
                "many other positions, the placebo, brings back "
                f"{round_percent(shares['placebo'])}."
            )
        if self.label == "positional":
            return (
                "It answers by position, not by key. When two keys change places, "
                f"{round_percent(self.follows_position.value)} of the answers stay with the "
                f"position and {round_percent(self.follows_key.value)} follow the key."
            )
        opening = "It recalls in more than one way" if self.label == "mixed" else "Not decided"
        return f"{opening}: {self.reason}."

    def draw(self) -> go.Figure | None:
        """Draw the restored shares by depth; None where nothing could be restored."""
        return None if self.restored is None else _draw_restored(self.restored)


def classify(
    found: Followed, restored: Restored | None, edited: Edited | None
) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence; the module's docstring defines the labels."""
    evidence: tuple[Measured, ...] = (found.key, found.position)
    label, reason = "undecided", "exchanging two keys does not surely change the margin"
    if restored is not None:
        label, reason, more = _classify_carrier(restored, edited)
        evidence += more
    of_either = found.of_either
    if not found.either.interval[0] > SOME:
        return "undecided", "too few answers follow either key or position", evidence
    if of_either.interval[0] >= ENOUGH:
        return "positional", "the answer stays with its position when keys change places", evidence
    if of_either.interval[0] > LITTLE and of_either.interval[1] < ENOUGH:
        return "mixed", "some answers follow the key, others the position", evidence
    if not of_either.interval[1] <= LITTLE:
        return (
            "undecided",
            "it is uncertain whether answers follow the key or the position",
            evidence,
        )
    return label, reason, evidence


def _classify_one_block(edited: Edited | None) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence for a model of one block, which has no inner depth."""
    if edited is None:
        reason = "a single block has no inner depth, and its mixer has no matrix to edit"
        return "undecided", reason, ()

    read = edited.offsets.get(int(edited.layers[0]))[0]

    def measure_left(name: str, share: np.ndarray, ends: np.ndarray) -> Measured:
        low, high = ends[-1, 0]
        return Measured(
            f"left with {name} exchanged", float(share[-1, 0]), (float(low), float(high))
        )

    values = measure_left(name_place(read, "values"), edited.left, edited.interval)
    others = measure_left("other positions", edited.placebo, edited.placebo_interval)
    if values.interval[1] <= LITTLE and others.interval[0] >= ENOUGH:
        return (
            "direct",
            "the one block finds each value by its key and reads "
            + (name_place(read, "it") if read else "it in place"),
            (values, others),
        )
    reason = "a single block has no inner depth, and the answer does not surely go with its value"
    return "undecided", reason, (values, others)


def _classify_carrier(
    restored: Restored, edited: Edited | None
) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence for answers that follow the key."""
    inner = range(1, len(restored.depths) - 1)
    if not inner:
        return _classify_one_block(edited)

    def get_restored(site: str, i: int) -> Measured:
        place, j = f"{site} restored after block {restored.depths[i] - 1}", SITES.index(site)
        low, high = restored.interval[j, i]
        return Measured(place, float(restored.share[j, i]), (float(low), float(high)))

    best = max(inner, key=lambda i: restored.share[SITES.index("value"), i])
    value, placebo = get_restored("value", best), get_restored("placebo", best)
    others = [
        max((get_restored("key", i), get_restored("query", i)), key=lambda found: found.interval[0])
        for i in inner
    ]
    evidence = (
        value,
        placebo,
        get_restored("key", best),
        get_restored("query", best),
        get_restored("elsewhere", best),
    )
    gathered = 0 if edited is None else edited.offsets.gathered
    place = name_place(gathered, "the value") if gathered else "the value's position"
    between = int(restored.depths[-1]) - 1
    depths = (
        "at any depth"
        if len(inner) == between
        else f"at the {len(inner)} of {between} depths tried"
    )
    if not placebo.interval[1] <= LITTLE:
        return "undecided", "as many random other positions restore the answer too", evidence
    if value.interval[0] >= ENOUGH:
        return (
            "induction",
            f"{place} has gathered its key, and the query reads it there",
            evidence,
        )
    if value.interval[0] > LITTLE and value.interval[1] < ENOUGH:
        return "mixed", f"{place} carries its key in part", evidence
    if not value.interval[1] <= LITTLE:
        return (
            "undecided",
            f"it is uncertain how much of its key {place} carries",
            evidence,
        )
    if all(other.interval[0] >= ENOUGH for other in others):
        none = f"{place} does not carry" if gathered else "no value's position carries"
        return "direct", f"{none} its key {depths}", evidence
    return "undecided", "no single position carries the answer at every depth", evidence


def _describe_restoring(evidence: list[Measured], gathered: int) -> str:
    """Describe what each site restores at the depth that decides the label."""
    shares = []
    for measured in evidence:
        low, high = measured.interval
        site = measured.name.partition(" ")[0]
        ends = f" ({format_share(low)} to {format_share(high)})" if site == "value" else ""
        name = name_place(gathered if site == "value" else 0, SITE_NAMES[site])
        shares.append(f"{name} {format_share(measured.value)}{ends}")
    depth = evidence[0].name.partition(" restored ")[2]
    return f"Share of the answer restored {depth}: by {', '.join(shares)}"


def _draw_restored(found: Restored) -> go.Figure:
    """Draw the restored share by depth, one line per site."""
    fig = new_figure(height=360)
    symbols = ("square", "diamond", "circle", "triangle-up", "x")
    names = ("keys", "values", "queries", "all else", "placebo")
    dashes = ("solid", "solid", "solid", "dash", "dot")
    spread = 0.012 * (found.depths[-1] - found.depths[0])
    for i, name in enumerate(names):
        muted = {"color": MUTED} if i >= 3 else {}
        fig.add_scatter(
            # Shift the lines sideways, so that markers at the same height do not overlap.
            x=found.depths + spread * (i - 2),
            y=found.share[i],
            mode="lines+markers",
            line={"dash": dashes[i], "width": 2 if i < 3 else 1.3, **muted},
            marker={"symbol": symbols[i], "size": 9 if i < 3 else 8, **muted},
            error_y=make_whiskers(found.share[i], found.interval[i], 1.2, 4),
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
        title_text="blocks that the residual stream has passed",
    )
    fig.update_yaxes(title_text="answer restored, share of the margin")
    return fig.update_layout(margin_t=84)
