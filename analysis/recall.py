"""Does it find what was stored? Where the mass of queries and values lies, and recall by place."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from plotly.subplots import make_subplots

from analysis import pair_mass
from analysis.base import NotApplicableError, Subject, Words
from analysis.figures import style
from analysis.figures.style import percent
from analysis.links import has_pairs
from analysis.measures.intervals import share_interval
from analysis.pair_mass import Masses, rows_of
from analysis.scoring import scored
from tasks.base import Batch

TITLE = "Does it find what was stored?"
SLOT_BINS = 16
"""Most bins of store slots."""
BAND = "rgba(128, 134, 145, 0.28)"
"""`style.MUTED`, to be seen through."""


@dataclass(frozen=True)
class Bins:
    """Accuracy by bins of a whole number.

    Attributes:
        first: smallest number of each bin.
        last: its largest, included.
        accuracy: share of right answers in [0, 1].
        interval: 95 %, low and high (`share_interval`).
        count: queries in the bin, ≥ 1.
    """

    first: Int[np.ndarray, " n"]
    last: Int[np.ndarray, " n"]
    accuracy: Float[np.ndarray, " n"]
    interval: Float[np.ndarray, "n 2"]
    count: Int[np.ndarray, " n"]


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
        slot: accuracy by store slot, from 0.
        decoy: accuracy without (0) and with (1) a decoy: a filler before the query that equals
            its key; bins without queries are left out; None where the task has no decoys.
    """

    split: str
    rows: int
    accuracy: float
    interval: tuple[float, float]
    chance: float
    distance: Bins
    slot: Bins
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
        interval=share_interval(right, rows, rng),
        chance=subject.task.chance,
        distance=bins(distance, doubling, right, rows, rng),
        slot=bins(slots, np.arange(0, slots.max() + width + 1, width), right, rows, rng),
        decoy=None if decoy is None else bins(decoy, np.arange(3), right, rows, rng),
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


def bins(
    number: Int[np.ndarray, " q"],
    edges: Int[np.ndarray, " edges"],
    right: Bool[np.ndarray, " q"],
    rows: Int[np.ndarray, " q"],
    rng: np.random.Generator,
) -> Bins:
    """Return accuracy by bins edges[i] ≤ number < edges[i + 1]; empty ones are left out."""
    places = np.digitize(number, edges) - 1
    found = np.unique(places)
    inside = [places == place for place in found]
    return Bins(
        first=edges[found],
        last=np.minimum(edges[found + 1] - 1, number.max()),
        accuracy=np.array([right[i].mean() for i in inside]),
        interval=np.array([share_interval(right[i], rows[i], rng) for i in inside]),
        count=np.array([i.sum() for i in inside]),
    )


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
    says += _contrast(found.distance, "distance", "distances") + ", "
    says += _contrast(found.slot, "store slot", "store slots")
    says += "" if found.decoy is None else f"; {_decoys(found.decoy)}"
    reading = (
        "Dots are bins of queries; bands are 95 %, the wider of Wilson's interval and of one that "
        "resamples whole rows."
    )
    if found.split == "probe":
        reading += " On the probe split a query's slot is independent of its pair's store slot."
    says += "."
    return Words(title, says, reading, f"Two lines of accuracy with bands. {says}")


def _contrast(found: Bins, one: str, many: str) -> str:
    """Say where accuracy is best and worst, if these two bins can be told apart."""
    best, worst = int(found.accuracy.argmax()), int(found.accuracy.argmin())
    if not found.interval[worst, 1] < found.interval[best, 0]:
        return f"no {one} stands out"
    ends = [
        f"{percent(float(found.accuracy[i]))} at {many if found.last[i] > found.first[i] else one} "
        f"{_span(found, i)}"
        for i in (best, worst)
    ]
    return f"{ends[0]} against {ends[1]}"


def _span(found: Bins, i: int) -> str:
    first, last = found.first[i], found.last[i]
    return f"{first}" if first == last else f"{first}–{last}"


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
    drawn = make_subplots(rows=2, cols=1, vertical_spacing=0.2, figure=style.figure(height=480))
    panels = (("distance", found.distance), ("slot", found.slot))
    for row, (name, binned) in enumerate(panels, 1):
        middle = (binned.first + binned.last) / 2
        if name == "distance":
            middle = np.sqrt(binned.first * binned.last)
        spans = [_span(binned, i) for i in range(len(binned.first))]
        drawn.add_scatter(
            x=np.concatenate([middle, middle[::-1]]),
            y=np.concatenate([binned.interval[:, 1], binned.interval[::-1, 0]]),
            fill="toself",
            fillcolor=BAND,
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            name="95 %",
            showlegend=row == 1,
            row=row,
            col=1,
        )
        drawn.add_scatter(
            x=middle,
            y=binned.accuracy,
            mode="lines+markers",
            line={"width": 2},
            marker={"size": 7, "symbol": "circle" if row == 1 else "square"},
            name=f"by {'distance' if row == 1 else 'store slot'}",
            cliponaxis=False,
            customdata=np.stack([spans, binned.count.astype(str)], 1),
            hovertemplate="%{customdata[0]}: %{y:.2%} of %{customdata[1]} queries<extra></extra>",
            row=row,
            col=1,
        )
        drawn.add_scatter(
            x=middle[[0, -1]],
            y=[found.chance, found.chance],
            mode="lines",
            line={"color": style.MUTED, "width": 1.2, "dash": "dot"},
            name="chance",
            showlegend=row == 1,
            hovertemplate="chance: %{y:.2%}<extra></extra>",
            row=row,
            col=1,
        )
    drawn.update_yaxes(range=[-0.05, 1.05], tickformat=".0%", title_text="accuracy")
    drawn.update_xaxes(showgrid=False)
    ends = found.distance.first
    drawn.update_xaxes(
        type="log",
        tickvals=ends,
        title_text="distance from value to query, tokens",
        row=1,
        col=1,
    )
    drawn.update_xaxes(title_text="store slot, from 0", row=2, col=1)
    return drawn.update_layout(margin_t=84)
