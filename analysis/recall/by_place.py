"""Recall by where a pair was stored and asked for."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Int
from plotly.subplots import make_subplots

from analysis.base import Finding, Subject, Words
from analysis.plots.binned import add_bins
from analysis.plots.style import new_figure
from analysis.scoring import scored
from analysis.statistics.binned import Bins, bin_accuracy, describe_contrast
from analysis.statistics.intervals import bound_share
from analysis.words import percent, percents
from tasks.base import Batch

SLOT_BINS = 16
"""Maximum number of bins of store slots."""


@dataclass(frozen=True)
class RecallByPlace(Finding):
    """Recall by where the pair was stored and asked for.

    Attributes:
        split: of the rows; on "probe" the query's slot says nothing about the store slot.
        rows: how many.
        accuracy: share of right answers, in [0, 1].
        interval: 95 %, low and high.
        chance: accuracy of a uniform guess.
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

    def describe(self) -> Words:
        """Say how much is recalled, and where most and least."""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        title = f"Recall by distance and store slot, {self.split} split, {rows}"
        accuracy, low, high = percents(self.accuracy, *self.interval)
        says = f"{accuracy} of the answers are right ({low} to {high}; "
        says += f"chance {percent(self.chance)}): "
        says += describe_contrast(self.distance, "distance", "distances")
        if self.slot is not None:
            says += ", " + describe_contrast(self.slot, "store slot", "store slots")
        says += "." if self.decoy is None else f"; {_describe_decoys(self.decoy)}."
        reading = (
            "Dots are bins of queries. Bands are 95 % intervals, the wider of Wilson's and of one "
            "that resamples whole rows."
        )
        if self.split == "probe":
            reading += " On the probe split a query's slot is independent of its pair's store slot."
        return Words(title, says, reading, f"Accuracy as lines with bands. {says}")

    def draw(self) -> go.Figure:
        """Draw accuracy by distance over accuracy by store slot, each with its band."""
        panels = 1 if self.slot is None else 2
        canvas = new_figure(height=240 * panels)
        fig = make_subplots(rows=panels, cols=1, vertical_spacing=0.2, figure=canvas)
        middle = np.sqrt(self.distance.first * self.distance.last)
        add_bins(fig, self.distance, middle, self.chance, "by distance", row=1)
        if self.slot is not None:
            middle = (self.slot.first + self.slot.last) / 2
            add_bins(fig, self.slot, middle, self.chance, "by store slot", row=2)
            fig.update_xaxes(title_text="store slot, from 0", row=2, col=1)
        fig.update_yaxes(range=[-0.05, 1.05], tickformat=".0%", title_text="accuracy")
        fig.update_xaxes(showgrid=False)
        ends = self.distance.first
        fig.update_xaxes(
            type="log",
            tickvals=ends,
            title_text="distance from value to query, tokens",
            row=1,
            col=1,
        )
        return fig.update_layout(margin_t=84)


def measure_by_place(subject: Subject) -> RecallByPlace:
    """Measure accuracy by distance, store slot and decoys, on the probe split if there is one."""
    split, batch = "test", subject.batch
    if "probe" in subject.task.splits:
        split = "probe"
        batch = subject.task.batch(
            split=split,
            size=len(batch.inputs),
            seed=subject.seed,
            device=batch.inputs.device,
        )
    right, rows, links = answer_queries(subject, batch)
    rng = np.random.default_rng(subject.seed)
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


def answer_queries(
    subject: Subject, batch: Batch
) -> tuple[Bool[np.ndarray, " q"], Int[np.ndarray, " q"], dict[str, Int[np.ndarray, " q"]]]:
    """Return for every query whether its answer is right, its row, and its links."""
    found = scored(subject.model, batch)
    right = torch.full(batch.inputs.shape, -1, dtype=torch.int64, device=batch.inputs.device)
    right[found.rows, found.positions] = found.right.long()
    query = batch.links["query_pos"]
    answer = right.gather(1, query.clamp(min=0)).cpu().numpy()
    real = (query.cpu().numpy() >= 0) & (answer >= 0)
    links = {
        name: link.cpu().numpy()[real]
        for name, link in batch.links.items()
        if link.shape == query.shape
    }
    return answer[real] == 1, real.nonzero()[0], links


def _rank_in_row(
    rows: Int[np.ndarray, " q"], values: Int[np.ndarray, " q"]
) -> Int[np.ndarray, " q"]:
    """Return the rank of each value's position among those of its row, from 0."""
    rank = np.empty_like(values)
    for row in np.unique(rows):
        _, rank[rows == row] = np.unique(values[rows == row], return_inverse=True)
    return rank


def _describe_decoys(found: Bins) -> str:
    """Compare queries with and without a decoy."""
    if len(found.first) < 2:
        which = "no query has" if found.first[0] == 0 else "every query has"
        return f"{which} a decoy before it"
    without, with_one = (
        f"{percent(float(share))} ({percent(float(ends[0]))} to {percent(float(ends[1]))})"
        for share, ends in zip(found.accuracy, found.interval, strict=True)
    )
    return f"without a decoy before the query {without}, with one {with_one}"
