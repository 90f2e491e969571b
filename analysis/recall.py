"""Does it find what was stored? Where the mass of queries and values lies, and recall by place."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Curves, Dots, Line, Pairs, curves, pairs
from analysis.links import IN_PLACE, SHOWS, Offsets, find_offsets, find_pairs, has_pairs
from analysis.mixing import BlockMixer, collect_mixers
from analysis.scoring import scored
from analysis.statistics.comparisons import Bins, bin_accuracy, describe_contrast, format_span
from analysis.words import name_head, name_layers, name_place, percent, percents
from lab.intervals import bootstrap, bound_share
from lab.layers.mixer import MatrixMixer
from tasks.base import count_rows

__all__ = ["TITLE", "measure"]

TITLE = "Does it find what was stored?"
QUANTITIES = ("query → value", "query → key", "value → key")
MASS_TOKENS = 16_384
"""Tokens of the rows whose matrices are read. Matrices are quadratic in a row's length, and rows
are much alike."""
MASS_ROWS = 64
"""Maximum number of rows that are read, however short."""
LINES = 32
"""Maximum number of lines of a figure; with more heads, each layer shows its highest."""
SLOT_BINS = 16
"""Maximum number of bins of store slots."""


def measure(subject: Subject) -> "list[PairMass | RecallByPlace]":
    """Return the mass on pairs, where a mixer offers a matrix, and the recall by place.

    Raises:
        NotApplicableError: for a task that asks for no value stored beside its key.
    """
    if not has_pairs(subject.batch):
        raise NotApplicableError("the task asks for no value that is stored beside its key")
    by_place, pair_mass = measure_by_place(subject), measure_pair_mass(subject)
    return [by_place] if pair_mass is None else [pair_mass, by_place]


@dataclass(frozen=True)
class PairMass(Finding):
    """Where queries look and what values gather: shares of Σ_j |M_ij|, means over pairs.

    Attributes:
        layers: block of each head [n].
        heads: its number in the block [n].
        share: mean share in [0, 1] of query → value, query → key and value → key, one row per head.
        interval: 95 % by resampling the rows of the batch, low and high; NaN for a single row.
        chance: what rows of equal entries would give: mean 1/(q + 1), 1/(q + 1), 1/(v + 1).
        without: layers whose mixer offers no matrix.
        offsets: how far after a value it is found, where a convolution moved it.
    """

    layers: Int[np.ndarray, " n"]
    heads: Int[np.ndarray, " n"]
    share: Float[np.ndarray, "n 3"]
    interval: Float[np.ndarray, "n 3 2"]
    chance: Float[np.ndarray, " 3"]
    without: tuple[int, ...]
    offsets: Offsets = IN_PLACE

    title = "Mass from queries and values to their pair"
    reading = (
        "A dot is a head's mean share of Σ_j |M_ij| over pairs and rows, the bar its 95 % interval "
        "over rows. The grey upright tick is what a uniform row would give."
    )

    @property
    def says(self) -> str:
        """The heads with the largest shares, and whether any of them stands out."""
        opening = "No head clearly looks at its pair"
        if (self.interval[:, :, 0].max(0) >= self.chance + SHOWS * (1 - self.chance)).any():
            opening = "Heads look at their pair"
        (asked, read), _, (written, bound) = self._list_largest()
        return (
            f"{opening}: query rows put up to {read[2]} ({read[1]}; uniform row: {read[4]}) of "
            f"their mass on {name_place(asked, 'the value they ask for')}, and the row of "
            f"{name_place(written, 'a value')} puts up to {bound[2]} ({bound[1]}; uniform row: "
            f"{bound[4]}) on its key."
        )

    def numbers(self) -> Table:
        """Return the largest share of each quantity, beside what a uniform row gives."""
        rows = [row for _, row in self._list_largest()]
        if self.without:
            rows.append(("no matrix", name_layers(self.without), "", "", ""))
        return Table(("mass", "head", "largest share", "95 % interval", "uniform row"), tuple(rows))

    def _list_largest(self) -> list[tuple[int, tuple[str, ...]]]:
        """Return for each quantity how far after a value it lies, and a row of the table."""
        found = []
        for quantity, i in enumerate(self.share.argmax(0)):
            read, written = self.offsets.get(int(self.layers[i]))
            offset = (read, 0, written)[quantity]
            name = QUANTITIES[quantity].replace("value", name_place(offset, "value"))
            low, high = self.interval[i, quantity]
            ends = "one row" if math.isnan(low) else f"{percent(low)} to {percent(high)}"
            # The row of a later position has less there than the value's own.
            below = "below " if quantity == 2 and offset else ""
            chance = f"{below}{percent(self.chance[quantity])}"
            share = percent(self.share[i, quantity])
            found.append((offset, (name, self._name(i), share, ends, chance)))
        return found

    def figure(self) -> go.Figure:
        """Draw one line per head, with a dot for each quantity and a tick where chance is."""
        lines = [np.array([i]) for i in range(len(self.heads))]
        names = [self._name(i) for i in range(len(self.heads))]
        if len(self.heads) > LINES:
            lines = [np.flatnonzero(self.layers == layer) for layer in np.unique(self.layers)]
            names = [f"layer {self.layers[line[0]]}, highest head" for line in lines]
        dots = []
        for quantity, name in enumerate(QUANTITIES):
            best = [int(line[self.share[line, quantity].argmax()]) for line in lines]
            notes = [self._name(i) for i in best]
            chance = np.full(len(lines), self.chance[quantity])
            dots += [
                Dots(name, self.share[best, quantity], self.interval[best, quantity], notes=notes),
                Dots("a uniform row", chance, look="chance"),
            ]
        return pairs(names, Pairs(dots, Axis("share of the row's mass", "share")))

    def _name(self, i: int) -> str:
        """Name a head: by its layer alone if that has no other head."""
        alone = (self.layers == self.layers[i]).sum() == 1
        return f"layer {self.layers[i]}" if alone else name_head(self.layers[i], self.heads[i])


@torch.no_grad()
def measure_pair_mass(subject: Subject) -> PairMass | None:
    """Measure every head's mass on pairs; None where no mixer offers a matrix."""
    size, seq_len = subject.batch.inputs.shape
    rows = min(size, count_rows(MASS_TOKENS, seq_len, fewest=2, most=MASS_ROWS))
    batch = subject.batch[slice(0, rows)]
    links = np.stack([link.cpu().numpy() for link in find_pairs(batch)], 1)
    stored = [link[:, link[0] >= 0] for link in links]
    rng, offsets = np.random.default_rng(subject.seed), find_offsets(subject)
    found: list[tuple[BlockMixer, int, np.ndarray]] = []
    without = []
    for mixer in collect_mixers(subject.model, batch):
        if not isinstance(mixer.module, MatrixMixer):
            without.append(mixer.layer)
            continue
        read, written = offsets.get(mixer.layer)
        rows_of = []
        for i, (query, key, value) in enumerate(stored):
            targets = np.stack([query, query, value + written])
            found_in_row = mixer.measure_shares(i, targets, np.stack([value + read, key, key]))
            rows_of.append(found_in_row.mean(2).T)
        by_row = np.stack(rows_of)
        found += [(mixer, head, by_row[:, :, head]) for head in range(by_row.shape[2])]
    if not found:
        return None
    # Of a query's row and of a value's: means over a row's pairs, then over rows.
    chance = [float(np.mean([(1 / (pairs[i] + 1)).mean() for pairs in stored])) for i in (0, 0, 2)]
    return PairMass(
        layers=np.array([mixer.layer for mixer, _, _ in found]),
        heads=np.array([head for _, head, _ in found]),
        share=np.array([by_row.mean(0) for _, _, by_row in found]),
        interval=np.array([[bootstrap(of, rng) for of in by_row.T] for _, _, by_row in found]),
        chance=np.array(chance),
        without=tuple(without),
        offsets=offsets,
    )


@dataclass(frozen=True)
class RecallByPlace(Finding):
    """Recall by where the pair was stored and asked for.

    Attributes:
        split: of the rows; on "probe" the query's slot says nothing about the store slot.
        distance: accuracy by query_pos − value_pos, bins that double.
        slot: accuracy by store slot, from 0; None where rows have only one.
        decoy: accuracy without (0) and with (1) a decoy, a filler before the query that equals
            its key; bins without queries are left out; None where the task has no decoys.
    """

    split: str
    rows: int
    accuracy: float
    interval: tuple[float, float]
    chance: float
    distance: Bins
    slot: Bins | None
    decoy: Bins | None

    title = "Recall by distance and store slot"
    reading = (
        "Dots are bins of queries. Bands are 95 % intervals, the wider of Wilson's and of one that "
        "resamples whole rows. On the probe split a query's slot is independent of its pair's "
        "store slot."
    )

    @property
    def says(self) -> str:
        """How much is recalled, and at which distance most and least."""
        accuracy, low, high = percents(self.accuracy, *self.interval)
        return (
            f"{accuracy} of the answers are right ({low} to {high}; chance "
            f"{percent(self.chance)}): {describe_contrast(self.distance, 'distance', 'distances')}."
        )

    def numbers(self) -> Table:
        """Return which store slots stand out, accuracy with and without decoys, and the rows."""
        rows = [("rows", f"{self.rows} of the {self.split} split")]
        if self.slot is not None:
            slots = describe_contrast(self.slot, "store slot", "store slots")
            rows.append(("by store slot", slots))
        if (decoys := self.decoy) is not None:
            for with_one, share, ends in zip(
                decoys.first, decoys.accuracy, decoys.interval, strict=True
            ):
                share, low, high = percents(share, *ends)
                name = f"{'a' if with_one else 'no'} decoy before the query"
                rows.append((name, f"{share} ({low} to {high})"))
        return Table(("recall", ""), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw accuracy by distance over accuracy by store slot, each with its band."""
        middle = np.sqrt(self.distance.first * self.distance.last)
        ticks = {float(first): f"{first}" for first in self.distance.first}
        by_distance = Axis("distance from value to query, tokens", scale="log", ticks=ticks)
        panels = [self._draw_bins("by distance", self.distance, middle, by_distance)]
        if self.slot is not None:
            middle = (self.slot.first + self.slot.last) / 2
            by_slot = Axis("store slot, from 0")
            panels.append(self._draw_bins("by store slot", self.slot, middle, by_slot))
        return curves(panels, by_distance)

    def _draw_bins(self, name: str, bins: Bins, middle: Float[np.ndarray, " n"], x: Axis) -> Curves:
        spans = [format_span(bins, i) for i in range(len(bins.first))]
        notes = [f"{span}, {n} answers" for span, n in zip(spans, bins.count, strict=True)]
        line = Line(name, middle, bins.accuracy, bins.interval, "band", notes=notes)
        return Curves(
            [line], Axis("accuracy", "share"), levels={"chance": self.chance}, x=x, height=170
        )


def measure_by_place(subject: Subject) -> RecallByPlace:
    """Measure accuracy by distance, store slot and decoys, on the probe split if there is one."""
    split, batch, rng = "test", subject.batch, np.random.default_rng(subject.seed)
    if "probe" in subject.task.splits:
        split, device = "probe", batch.inputs.device
        size = len(batch.inputs)
        batch = subject.task.batch(split=split, size=size, seed=subject.seed, device=device)
    found, query = scored(subject.model, batch), batch.links["query_pos"]
    places = found.find(query).cpu().numpy()
    real = places >= 0
    right, rows = found.right.cpu().numpy()[places[real]], real.nonzero()[0]
    links = {
        name: link.cpu().numpy()[real]
        for name, link in batch.links.items()
        if link.shape == query.shape
    }
    slots = links["store_slot"] if "store_slot" in links else _rank_in_row(rows, links["value_pos"])
    width = max(1, math.ceil((slots.max() + 1) / SLOT_BINS))
    distance = links["query_pos"] - links["value_pos"]
    doubling = 2 ** np.arange(int(distance.max()).bit_length() + 1)
    decoy = links.get("decoy")
    return RecallByPlace(
        split=split,
        rows=len(batch.inputs),
        accuracy=float(right.mean()),
        interval=bound_share(right, rows, rng),
        chance=subject.task.chance,
        distance=bin_accuracy(distance, doubling, right, rows, rng),
        slot=bin_accuracy(slots, np.arange(0, slots.max() + width + 1, width), right, rows, rng)
        if slots.max()
        else None,
        decoy=None if decoy is None else bin_accuracy(decoy, np.arange(3), right, rows, rng),
    )


def _rank_in_row(
    rows: Int[np.ndarray, " q"], values: Int[np.ndarray, " q"]
) -> Int[np.ndarray, " q"]:
    """Return the rank of each value's position among those of its row, from 0."""
    rank = np.empty_like(values)
    for row in np.unique(rows):
        _, rank[rows == row] = np.unique(values[rows == row], return_inverse=True)
    return rank
