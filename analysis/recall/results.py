"""Does it find what was stored? Where the mass of queries and values lies, and recall by place."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Int
from plotly.subplots import make_subplots

from analysis.base import NotApplicableError, Subject, Words
from analysis.links import has_pairs
from analysis.plots import style
from analysis.plots.binned import add_bins
from analysis.recall import pair_mass
from analysis.recall.pair_mass import Masses, rows_of
from analysis.scoring import scored
from analysis.statistics.binned import Bins, bin_accuracy, describe_contrast
from analysis.statistics.intervals import bound_share
from analysis.words import percent
from tasks.base import Batch

TITLE = "Does it find what was stored?"
SLOT_BINS = 16
"""Most bins of store slots."""


@dataclass(frozen=True)
class Recalled:
    """Recall by where the pair was stored and asked for.

    Attributes:
        split: of the rows; on "probe" the query's slot says nothing about the store slot.
        rows: how many.
        accuracy: share of right answers, in [0, 1].
        interval: 95 %, low and high.
        chance: accuracy of a uniform guess.
        distance: accuracy by query_pos − value_pos, bins that double.
        slot: accuracy by store slot, from 0; None where a row has one.
        decoy: accuracy without (0) and with (1) a decoy: a filler before the query that equals
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


def measure(subject: Subject) -> list[Masses | Recalled]:
    """Return the masses, where a mixer offers a matrix, and the recall by place.

    Raises:
        NotApplicableError: for a task whose rows store no pairs.
    """
    if not has_pairs(subject.batch):
        raise NotApplicableError("the task's rows store no pairs")
    recalled = recall_by_place(subject)
    found = pair_mass.masses(subject)
    return [recalled] if found is None else [found, recalled]


def recall_by_place(subject: Subject) -> Recalled:
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
    right, rows, links = asked(subject, batch)
    rng = np.random.default_rng(subject.seed)
    slots = links["store_slot"] if "store_slot" in links else _rank(rows, links["value_pos"])
    width = max(1, math.ceil((slots.max() + 1) / SLOT_BINS))
    distance = links["query_pos"] - links["value_pos"]
    doubling = 2 ** np.arange(int(distance.max()).bit_length() + 1)
    decoy = links.get("decoy")
    return Recalled(
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


def asked(
    subject: Subject, batch: Batch
) -> tuple[Bool[np.ndarray, " q"], Int[np.ndarray, " q"], dict[str, Int[np.ndarray, " q"]]]:
    """Return of every query whether its answer is right, its row, and its links."""
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


def _rank(rows: Int[np.ndarray, " q"], values: Int[np.ndarray, " q"]) -> Int[np.ndarray, " q"]:
    """Return which of its row's values each is, from 0 by position."""
    rank = np.empty_like(values)
    for row in np.unique(rows):
        _, rank[rows == row] = np.unique(values[rows == row], return_inverse=True)
    return rank


def describe(result: Masses | Recalled) -> Words:
    """Put masses or recall in words."""
    return pair_mass.in_words(result) if isinstance(result, Masses) else _recall_in_words(result)


def draw(result: Masses | Recalled) -> go.Figure:
    """Draw masses or recall."""
    return pair_mass.drawing(result) if isinstance(result, Masses) else _draw_recall(result)


def _recall_in_words(found: Recalled) -> Words:
    title = f"Recall by distance and store slot, {found.split} split, {rows_of(found.rows)}"
    low, high = found.interval
    says = f"{percent(found.accuracy)} of the answers are right ({percent(low)} to {percent(high)}"
    says += f"; chance {percent(found.chance)}): "
    says += describe_contrast(found.distance, "distance", "distances")
    if found.slot is not None:
        says += ", " + describe_contrast(found.slot, "store slot", "store slots")
    says += "" if found.decoy is None else f"; {_decoys(found.decoy)}"
    reading = (
        "Dots are bins of queries; bands are 95 %, the wider of Wilson's interval and of one that "
        "resamples whole rows."
    )
    if found.split == "probe":
        reading += " On the probe split a query's slot is independent of its pair's store slot."
    says += "."
    return Words(title, says, reading, f"Accuracy as lines with bands. {says}")


def _decoys(found: Bins) -> str:
    """Compare queries with and without a decoy."""
    if len(found.first) < 2:
        which = "no query has" if found.first[0] == 0 else "every query has"
        return f"{which} a decoy before it"
    without, with_one = (
        f"{percent(float(share))} ({percent(float(ends[0]))} to {percent(float(ends[1]))})"
        for share, ends in zip(found.accuracy, found.interval, strict=True)
    )
    return f"without a decoy before the query {without}, with one {with_one}"


def _draw_recall(found: Recalled) -> go.Figure:
    """Draw accuracy by distance over accuracy by store slot, each with its band."""
    panels = 1 if found.slot is None else 2
    canvas = style.new_figure(height=240 * panels)
    fig = make_subplots(rows=panels, cols=1, vertical_spacing=0.2, figure=canvas)
    middle = np.sqrt(found.distance.first * found.distance.last)
    add_bins(fig, found.distance, middle, found.chance, "by distance", row=1)
    if found.slot is not None:
        middle = (found.slot.first + found.slot.last) / 2
        add_bins(fig, found.slot, middle, found.chance, "by store slot", row=2)
        fig.update_xaxes(title_text="store slot, from 0", row=2, col=1)
    fig.update_yaxes(range=[-0.05, 1.05], tickformat=".0%", title_text="accuracy")
    fig.update_xaxes(showgrid=False)
    ends = found.distance.first
    fig.update_xaxes(
        type="log",
        tickvals=ends,
        title_text="distance from value to query, tokens",
        row=1,
        col=1,
    )
    return fig.update_layout(margin_t=84)
