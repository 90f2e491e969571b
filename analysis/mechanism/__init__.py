"""How the model recalls: a label for what interventions on pairs that exchange keys show.

In a clean row the query for key k has the right answer v. In the corrupt row, k has changed places
with the key of another pair, so the right answer is the other pair's value. Only the two key tokens
differ between the rows, and the residual stream at a value's position differs only by what it has
gathered about its key. `couples` makes the corrupt rows and measures what an answer follows,
`effects` measures the interventions.

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

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Curves, Line, curves
from analysis.links import IN_PLACE, Offsets, find_offsets, has_pairs
from analysis.mechanism.couples import (
    Followed,
    Measured,
    draw_couples,
    measure_baseline,
    measure_followed,
)
from analysis.mechanism.effects import (
    SITE_NAMES,
    SITES,
    Components,
    Edited,
    Restored,
    edit,
    format_ends,
    format_share,
    measure_components,
    restore,
)
from analysis.words import name_place, round_percent
from lab.intervals import bootstrap

__all__ = ["TITLE", "measure"]

TITLE = "How does it recall?"
ROW_TOKENS = 16_384
"""Maximum number of tokens to analyze, for a model of two blocks; deeper models get fewer rows."""
MOST_ROWS = 64
FEWEST_ROWS = 8
ENOUGH, LITTLE, SOME = 2 / 3, 1 / 3, 1 / 5
"""Thresholds of the labels."""
ROUTES = {
    "induction": "It recalls by induction: {place} gathers its key, and the query finds it there; "
    "restoring {places} alone brings back {value} of the answer, and as many other positions, the "
    "placebo, {placebo}.",
    "direct": "It recalls directly, as one mixer finds the key and reads the value in one step: "
    "{reason}; restoring {places} brings back at most {value} of the answer, and as many other "
    "positions, the placebo, {placebo}.",
    "direct in one block": "It recalls directly: {reason}; exchanging {exchanged} leaves {value} "
    "of the answer, and exchanging other positions, the placebo, {placebo}.",
    "positional": "It answers by position, not by key: when two keys change places, {by_position} "
    "of the answers stay with the position and {by_key} follow the key.",
    "mixed": "It recalls in more than one way: {reason}.",
    "undecided": "Not decided: {reason}.",
}
"""What each label means, and the shares that it rests on."""


def measure(subject: Subject) -> "list[Mechanism | Edited | Components]":
    """Return the mechanism, what edits of a mixer leave of recall, and which components carry it.

    Raises:
        NotApplicableError: when the task asks for no value that is stored beside its key, when
            rows store only one pair, or when exchanging keys does not exchange the answers.
    """
    if not has_pairs(subject.batch):
        raise NotApplicableError("the task asks for no value that is stored beside its key")
    seq_len, n_layers = subject.batch.inputs.shape[1], len(subject.model.blocks)
    wanted = ROW_TOKENS * 2 // (seq_len * max(2, n_layers))
    batch = subject.batch[slice(0, min(MOST_ROWS, max(FEWEST_ROWS, wanted)))]
    rng = np.random.default_rng(subject.seed)
    pairs = draw_couples(subject.task, batch, rng)
    if pairs is None:
        raise NotApplicableError("no row stores two pairs whose keys could be exchanged")
    if not pairs.valid.any():
        raise NotApplicableError("the answers do not change places when the keys do")
    found = measure_followed(subject, pairs.clean, rng)
    known = measure_baseline(subject.model, pairs)
    # Shares of the change are meaningless unless exchanging keys surely changes the margin.
    if not bootstrap(known.sum_changes(known.clean)[:, 1:], rng)[0] > 0:
        label = classify(found, None, None)
        return [Mechanism(*label, None, len(pairs.query))]
    offsets = find_offsets(subject)
    carried = known.shift_values(offsets.gathered)
    restored = restore(subject.model, carried, rng)
    edited = edit(subject.model, known, rng, offsets)
    label = classify(found, restored, edited)
    mechanism = Mechanism(*label, restored, len(pairs.query), offsets)
    components = measure_components(subject.model, carried, rng, offsets)
    return [mechanism, components] if edited is None else [mechanism, edited, components]


@dataclass(frozen=True)
class Mechanism(Finding):
    """How a model recalls.

    Attributes:
        restored: shares restored by depth and site; None if exchanging keys does not surely change
            the margin, so that there is nothing to restore.
        offsets: how far after a value it is found, where a convolution moved it.
    """

    label: str
    reason: str
    evidence: tuple[Measured, ...]
    restored: Restored | None
    rows: int
    offsets: Offsets = IN_PLACE

    title = "How it recalls: what restores the answer, by position and depth"
    reading = (
        "Corrupt rows are clean rows in which pairs exchanged keys, and here the clean residual "
        "stream replaces the corrupt one at some positions. At 0 the answer stays the corrupt "
        "row's; at 1 it is the clean row's again. Bars are 95 % intervals over rows. Both ends "
        "hold by construction: before the first block only the key tokens differ, and after the "
        "last only the query is read."
    )

    @property
    def says(self) -> str:
        """How the model recalls, and what the placebo does."""
        shares = ["" if math.isnan(m.value) else round_percent(m.value) for m in self.evidence]
        by_key, by_position, value, placebo = [*shares, "", ""][:4]
        one_block = self.restored is not None and len(self.restored.depths) == 2
        route = "direct in one block" if one_block and self.label == "direct" else self.label
        return ROUTES[route].format(
            reason=self.reason,
            place=name_place(self.offsets.gathered, "each value's position"),
            places=name_place(self.offsets.gathered, "the values' positions"),
            exchanged=name_place(self.offsets.get(0)[0], "two values"),
            by_key=by_key,
            by_position=by_position,
            value=value,
            placebo=placebo,
        )

    def numbers(self) -> Table:
        """Return the numbers that decide the label."""
        rows = [
            (found.name, format_share(found.value), format_ends(found.interval))
            for found in self.evidence
        ]
        measured = 0 if self.restored is None else self.restored.queries
        return Table(
            ("share of the answers, or of the margin", "", "95 % interval"),
            (*rows, ("measured on", f"{measured} queries", f"{self.rows} rows")),
        )

    def figure(self) -> go.Figure | None:
        """Draw the restored shares by depth; None where nothing could be restored."""
        if self.restored is None:
            return None
        depths, few = self.restored.depths, len(self.restored.depths) <= 4
        lines = [
            Line(
                SITE_NAMES[site],
                depths,
                self.restored.share[i],
                self.restored.interval[i],
                look=-1 if site == "placebo" else None,
            )
            for i, site in enumerate(SITES)
        ]
        ticks = {float(d): f"after block {d - 1}" if few else f"{d}" for d in depths}
        margin = 0.13 * float(depths[-1])  # half a label, on a phone
        x = Axis(
            "blocks that the residual stream has passed",
            ends=(-margin, float(depths[-1]) + margin),
            ticks=ticks | {0.0: "tokens"},
        )
        return curves([Curves(lines, Axis("answer restored, share of the margin"))], x)


def classify(
    found: Followed, restored: Restored | None, edited: Edited | None
) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence; the module's docstring defines the labels."""
    evidence: tuple[Measured, ...] = (found.key, found.position)
    label, reason = "undecided", "exchanging two keys does not surely change the margin"
    if restored is not None:
        inner = len(restored.depths) > 2
        carrier = _classify_carrier(restored, edited) if inner else _classify_one_block(edited)
        label, reason, more = carrier
        evidence += more
    low, high = found.of_either.interval
    if not found.either.interval[0] > SOME:
        label, reason = "undecided", "too few answers follow either key or position"
    elif low >= ENOUGH:
        label, reason = "positional", "the answer stays with its position when keys change places"
    elif low > LITTLE and high < ENOUGH:
        label, reason = "mixed", "some answers follow the key, others the position"
    elif not high <= LITTLE:
        label = "undecided"
        reason = "it is uncertain whether answers follow the key or the position"
    return label, reason, evidence


def _classify_one_block(edited: Edited | None) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence for a model of one block, which has no inner depth."""
    if edited is None:
        reason = "a single block has no inner depth, and its mixer has no matrix to edit"
        return "undecided", reason, ()
    read = edited.offsets.get(int(edited.layers[0]))[0]
    values, others = (
        Measured(f"left with {name} exchanged", float(share[-1, 0]), _to_ends(ends[-1, 0]))
        for name, share, ends in (
            (name_place(read, "values"), edited.left, edited.interval),
            ("other positions", edited.placebo, edited.placebo_interval),
        )
    )
    if values.interval[1] <= LITTLE and others.interval[0] >= ENOUGH:
        place = name_place(read, "it") if read else "it in place"
        reason = f"the one block finds each value by its key and reads {place}"
        return "direct", reason, (values, others)
    reason = "a single block has no inner depth, and the answer does not surely go with its value"
    return "undecided", reason, (values, others)


def _classify_carrier(
    restored: Restored, edited: Edited | None
) -> tuple[str, str, tuple[Measured, ...]]:
    """Return label, reason and evidence for answers that follow the key."""
    inner = range(1, len(restored.depths) - 1)

    def get_restored(site: str, i: int) -> Measured:
        name, j = f"{site} restored after block {restored.depths[i] - 1}", SITES.index(site)
        return Measured(name, float(restored.share[j, i]), _to_ends(restored.interval[j, i]))

    best = max(inner, key=lambda i: restored.share[SITES.index("value"), i])
    sites = ("value", "placebo", "key", "query", "elsewhere")
    evidence = tuple(get_restored(site, best) for site in sites)
    (low, high), placebo = evidence[0].interval, evidence[1].interval
    gathered = 0 if edited is None else edited.offsets.gathered
    place = name_place(gathered, "the value") if gathered else "the value's position"
    if not placebo[1] <= LITTLE:
        return "undecided", "as many random other positions restore the answer too", evidence
    if low >= ENOUGH:
        reason = f"{place} has gathered its key, and the query reads it there"
        return "induction", reason, evidence
    if low > LITTLE and high < ENOUGH:
        return "mixed", f"{place} carries its key in part", evidence
    if not high <= LITTLE:
        return "undecided", f"it is uncertain how much of its key {place} carries", evidence
    others = [max(get_restored(site, i).interval[0] for site in ("key", "query")) for i in inner]
    if all(other >= ENOUGH for other in others):
        between = int(restored.depths[-1]) - 1
        every = len(inner) == between
        depths = "at any depth" if every else f"at the {len(inner)} of {between} depths tried"
        none = f"{place} does not carry" if gathered else "no value's position carries"
        return "direct", f"{none} its key {depths}", evidence
    return "undecided", "no single position carries the answer at every depth", evidence


def _to_ends(interval: Float[np.ndarray, "2"]) -> tuple[float, float]:
    return float(interval[0]), float(interval[1])
