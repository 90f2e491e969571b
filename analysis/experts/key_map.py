"""Which experts are chosen, and together with which? The load on the grid of product keys."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Subject, Words
from analysis.experts import coactivation as expert_coactivation
from analysis.experts.coactivation import CoActivation, co_activation
from analysis.experts.pairs import Choices, choices, exchanged
from analysis.plots import style
from analysis.record import figure_only
from analysis.statistics.distributions import (
    entropy,
    joint_counts,
    miller_madow,
    mutual_information,
    shares,
)
from analysis.words import percent

TITLE = "Map of experts"
SIDE = 128
"""Most cells across a map: a larger grid is drawn as means of square blocks."""
DECADES = 3
"""How far below the most loaded cell the colours reach, powers of ten."""
LABELS = 2**16
"""Most choices of a layer whose row and column are compared: the null shuffles them often."""
ROUNDS = 100
"""Times that token ids exchange their columns."""
INITIAL = 2**13
"""About how many tokens untrained weights are looked at on."""
STEPS = [step * 10.0**decade for decade in range(-6, 8) for step in (1, 2, 5)]
"""Loads that may be labelled on the scale, multiples of uniform."""


@dataclass(frozen=True)
class LoadMap:
    """How a layer's choices lie on its grid of product keys; expert = row · columns + column.

    I(row; column) is over the choices: 0 where the map is the product of its marginals.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        tokens: that chose.
        per_token: choices a token makes, all retrieval heads together.
        row_share: of the choices, by row key.
        column_share: likewise by column key.
        used: experts chosen at least once.
        constant: whether every token chose the same experts.
        zero_keys: whether all keys are zero, so that all scores tie.
        looked_at: choices behind the four numbers that follow, of tokens drawn at random.
        information: I(row; column), plug-in, nats.
        corrected: the same, Miller–Madow.
        null: 97.5 % quantile of the plug-in value with the columns of other token ids.
        ids: different input tokens that the choices compared are of.
        most: the smaller of the entropies of row and column, nats: as large as I can be.
        counts: choices of each expert.
    """

    layer: int
    kind: str
    tokens: int
    per_token: int
    row_share: Float[np.ndarray, " rows"]
    column_share: Float[np.ndarray, " columns"]
    used: int
    constant: bool
    zero_keys: bool
    looked_at: int
    information: float
    corrected: float
    null: float
    ids: int
    most: float
    counts: Int[np.ndarray, "rows columns"] = figure_only()


def measure(subject: Subject) -> list[LoadMap | CoActivation]:
    """Return the map of each layer with product-key experts, then co-activation in all of them.

    Raises:
        NotApplicableError: for a model without such a layer.
    """
    found = choices(subject.model, subject.batch)
    initial = None
    if subject.run is not None:
        batch = subject.batch[: math.ceil(INITIAL / subject.task.seq_len)]
        initial = choices(subject.run.build().eval().to(batch.inputs.device), batch)
    rng = np.random.default_rng(subject.seed)
    return [*(load_map(layer, rng) for layer in found), co_activation(found, rng, initial)]


def load_map(found: Choices, rng: np.random.Generator) -> LoadMap:
    """Return how a layer's choices lie on its grid.

    Args:
        found: the choices.
        rng: draws the tokens that are compared, and shuffles.
    """
    experts, (rows, columns) = found.experts, found.shape
    counts = np.bincount(experts.ravel(), minlength=rows * columns).reshape(rows, columns)
    compared = found.sample(LABELS // experts.shape[1], rng)
    row, column = np.divmod(compared.experts, columns)
    joint = joint_counts(row.ravel(), column.ravel())
    # Which of another token's columns meets which row is left to chance as well.
    null = [
        mutual_information(joint_counts(row.ravel(), rng.permuted(other, axis=1).ravel()))
        for other in (column[exchanged(compared.ids, rng)] for _ in range(ROUNDS))
    ]
    return LoadMap(
        layer=found.layer,
        kind=found.kind,
        tokens=len(experts),
        per_token=experts.shape[1],
        row_share=shares(counts.sum(1)),
        column_share=shares(counts.sum(0)),
        used=int((counts > 0).sum()),
        constant=bool((np.sort(experts, axis=1) == np.sort(experts[0])).all()),
        zero_keys=found.zero_keys,
        looked_at=row.size,
        information=mutual_information(joint),
        corrected=miller_madow(joint),
        null=float(np.quantile(null, 0.975)),
        ids=len(np.unique(compared.ids)),
        most=float(min(entropy(joint.sum(1)), entropy(joint.sum(0)))),
        counts=counts,
    )


def describe(result: LoadMap | CoActivation) -> Words:
    """Put a map, or co-activation, in words."""
    return _words(result) if isinstance(result, LoadMap) else expert_coactivation.describe(result)


def draw(result: LoadMap | CoActivation) -> go.Figure | None:
    """Draw a map between its marginals, or how the PMI of pairs is distributed."""
    return _drawn(result) if isinstance(result, LoadMap) else expert_coactivation.draw(result)


def _words(found: LoadMap) -> Words:
    rows, columns = found.counts.shape
    title = f"Layer {found.layer} · {found.kind} · load on the grid of {rows} × {columns} experts"
    if (pool := _pool(found)) > 1:
        title += f", means of {pool} × {pool}"
    if found.constant:
        ties = "all keys are zero, so every score ties and " if found.zero_keys else ""
        says = f"The map is a set of {found.used} points: {ties}each of {found.tokens:,} tokens "
        says += f"takes the same {found.used} of {rows * columns:,} experts."
    else:
        says = f"{found.used:,} of {rows * columns:,} experts are chosen at all; {_joint(found)}."
    heaviest = " and ".join(
        f"{name} {share.argmax()} with {percent(float(share.max()))}"
        f" (uniform: {percent(1 / len(share))})"
        for name, share in (("row", found.row_share), ("column", found.column_share))
    )
    reading = (
        "Expert e = row · columns + column. Colour is an expert's share of all choices in "
        f"multiples of 1/{rows * columns:,}, logarithmic, the darkest end {10**DECADES:,} times "
        f"below the most loaded and beyond; empty cells were never chosen. Bars are the shares of "
        f"the keys, the largest {heaviest}, the dotted lines uniform. I(row; column) is over "
        f"{found.looked_at:,} choices, {found.corrected:.3f} nats with Miller–Madow's correction; "
        f"shuffled: 97.5 % quantile where each of {found.ids:,} token ids has another's columns, "
        "since tokens of one id choose much alike."
    )
    alt = f"Heat map of {title}, with a bar for each row key and each column key. {says}"
    return Words(title, says, reading, alt)


def _joint(found: LoadMap) -> str:
    """Say whether the row key tells of the column key beyond what so few token ids make of it."""
    value = f"I(row; column) = {found.information:.3f} of at most {found.most:.2f} nats"
    value += f" (shuffled: {found.null:.3f})"
    if found.information <= found.null:
        return (
            f"that the row key tells of the column key does not show beyond the chance of "
            f"{found.ids:,} token ids, {value}"
        )
    return f"the row key tells of the column key, {value}"


def _drawn(found: LoadMap) -> go.Figure:
    """Draw the map, bars of the columns above it, bars of the rows to its right."""
    rows, columns = found.counts.shape
    pool = _pool(found)
    load = found.counts * (rows * columns / found.counts.sum())
    load = _means(load, pool)
    with np.errstate(divide="ignore"):
        levels = np.where(load > 0, np.log10(load), np.nan)
    floor = float(np.nanmax(levels)) - DECADES
    across = style.WIDTH - 60 - 14
    cell = 0.82 * across / load.shape[1]
    side = min(cell * load.shape[0], 460)
    above, margins = 64, {"t": 58, "b": 100}
    fig = make_subplots(
        rows=2,
        cols=2,
        row_heights=[above, side],
        column_widths=[0.82, 0.18],
        horizontal_spacing=0.035,
        vertical_spacing=10 / (above + side + 10),
        specs=[[{}, None], [{}, {}]],
        figure=style.new_figure(round(above + side + 10 + margins["t"] + margins["b"])),
    )
    fig.add_heatmap(
        # From 0 up: plotly takes the diverging scale for what has both signs.
        z=np.maximum(levels - floor, 0).astype(np.float32),
        x0=(pool - 1) / 2,
        dx=pool,
        y0=(pool - 1) / 2,
        dy=pool,
        customdata=load.astype(np.float32),
        coloraxis="coloraxis",
        hoverongaps=False,
        hovertemplate="row %{y}, column %{x}: %{customdata:.3g} × uniform<extra></extra>",
        row=2,
        col=1,
    )
    bars = {"marker": {"color": style.MUTED, "line": {"width": 0}}, "showlegend": False}
    fig.add_bar(
        x=np.arange(columns),
        y=found.column_share,
        hovertemplate="column %{x}: %{y:.2%}<extra></extra>",
        row=1,
        col=1,
        **bars,
    )
    fig.add_bar(
        x=found.row_share,
        y=np.arange(rows),
        orientation="h",
        hovertemplate="row %{y}: %{x:.2%}<extra></extra>",
        row=2,
        col=2,
        **bars,
    )
    uniform = {"type": "line", "line": {"width": 1.5, "dash": "dot", "color": style.VERMILLION}}
    for ends in (
        {"x0": 0, "x1": 1, "xref": "x domain", "y0": 1 / columns, "y1": 1 / columns, "yref": "y"},
        {"x0": 1 / rows, "x1": 1 / rows, "xref": "x3", "y0": 0, "y1": 1, "yref": "y3 domain"},
    ):
        fig.add_shape(uniform | ends)
    along, down = [-0.5, columns - 0.5], [rows - 0.5, -0.5]
    fig.update_xaxes(range=along, showgrid=False, col=1)
    fig.update_xaxes(showticklabels=False, ticks="", row=1, col=1)
    fig.update_xaxes(title_text="column key", row=2, col=1)
    fig.update_yaxes(range=down, showgrid=False, row=2)
    fig.update_yaxes(title_text="row key", row=2, col=1)
    fig.update_yaxes(showticklabels=False, ticks="", row=2, col=2)
    percents = {"title_text": "share", "tickformat": ".0%", "nticks": 3, "rangemode": "tozero"}
    fig.update_yaxes(**percents, row=1, col=1)
    fig.update_xaxes(**percents, row=2, col=2)
    steps = [step for step in STEPS if 0 <= math.log10(step) - floor <= DECADES]
    return fig.update_layout(
        margin=margins,
        bargap=0,
        coloraxis={
            "cmin": 0,
            "cmax": DECADES,
            "colorbar": {
                "tickvals": [math.log10(step) - floor for step in steps],
                "ticktext": [f"×{step:g}" for step in steps],
            },
        },
    )


def _pool(found: LoadMap) -> int:
    """Return how many experts a cell has on each side."""
    return math.ceil(max(found.counts.shape) / SIDE)


def _means(load: Float[np.ndarray, "rows columns"], pool: int) -> Float[np.ndarray, "high wide"]:
    """Return the mean of each pool × pool block; the last ones may be smaller."""
    if pool == 1:
        return load
    sums, sizes = load, np.ones_like(load)
    for axis in (0, 1):
        starts = np.arange(0, load.shape[axis], pool)
        sums, sizes = (np.add.reduceat(part, starts, axis) for part in (sums, sizes))
    return sums / sizes
