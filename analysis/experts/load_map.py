"""The load of a layer's experts on the grid of its product keys."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Finding, Words
from analysis.experts.pairs import PairedChoices, exchange_ids
from analysis.plain import figure_only
from analysis.plots import style
from analysis.statistics.distributions import (
    compute_shares,
    count_joint,
    entropy,
    miller_madow,
    mutual_information,
)
from analysis.words import percent

SIDE = 128
"""Maximum number of cells on a side of a map; a larger grid is drawn as means of square blocks."""
DECADES = 3
"""Range of the colours below the most loaded cell, powers of ten."""
TALLEST = 460
"""Maximum height of a map, px of its layout; a map that would be taller has oblong cells."""
LABELS = 2**16
"""Maximum number of choices of a layer whose row and column are compared."""
ROUNDS = 100
"""Shuffles in which token ids exchange their columns."""
STEPS = [step * 10.0**decade for decade in range(-6, 8) for step in (1, 2, 5)]
"""Loads that may be labelled on the colour scale, multiples of uniform."""


@dataclass(frozen=True)
class LoadMap(Finding):
    """The choices of a layer on its grid of product keys; expert = row · columns + column.

    I(row; column) is taken over choices; it is 0 if the map is the product of its marginals.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        tokens: how many choose.
        per_token: choices of each token, all retrieval heads together.
        row_share: of the choices, by row key.
        column_share: likewise by column key.
        used: experts that are chosen at least once.
        constant: whether every token chooses the same experts.
        zero_keys: whether all keys are zero, so that all scores tie.
        looked_at: choices behind the numbers that follow, of a random sample of tokens.
        information: I(row; column), plug-in, nats.
        corrected: the same, Miller–Madow.
        null: 97.5 % quantile of the plug-in value if token ids exchange their columns.
        ids: different input tokens among those that are compared.
        most: the smaller of the entropies of row and column, nats, the largest possible value.
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

    @property
    def _pool(self) -> int:
        """How many experts a cell of the figure has on each side."""
        return math.ceil(max(self.counts.shape) / SIDE)

    def describe(self) -> Words:
        """Say how many experts are chosen, and whether row and column key depend on each other."""
        rows, columns = self.counts.shape
        total = rows * columns
        title = f"Layer {self.layer} · {self.kind} · load on the grid of {rows} × {columns} experts"
        if (pool := self._pool) > 1:
            title += f", means of {pool} × {pool}"
        if self.constant:
            ties = "all keys are zero, so all scores tie and " if self.zero_keys else ""
            says = (
                f"The map is a set of {self.used} points: {ties}each of {self.tokens:,} tokens "
                f"chooses the same {self.used} of {total:,} experts."
            )
        else:
            says = f"{self.used:,} of {total:,} experts are chosen at all; "
            says += f"{self._describe_information()}."
        heaviest = " and ".join(
            f"{name} {share.argmax()} with {percent(float(share.max()))}"
            f" (uniform: {percent(1 / len(share))})"
            for name, share in (("row", self.row_share), ("column", self.column_share))
        )
        reading = (
            "Expert e = row · columns + column. The colour is an expert's share of all choices, in "
            f"multiples of 1/{total:,}, on a logarithmic scale. The darkest colour stands for "
            f"{10**DECADES:,} times less than the most loaded expert, or still less; empty cells "
            f"were never chosen. Bars are the shares of the keys, the largest {heaviest}; dotted "
            f"lines are uniform. I(row; column) is measured on {self.looked_at:,} choices; Miller "
            f"and Madow's correction gives {self.corrected:.3f} nats. Tokens of one id choose "
            f"alike, so the shuffled value, a 97.5 % quantile, gives each of {self.ids:,} token "
            "ids the columns of another."
        )
        alt = f"Heat map of {title}, with a bar for each row key and each column key. {says}"
        return Words(title, says, reading, alt)

    def _describe_information(self) -> str:
        """Say whether the row key predicts the column key, beyond the chance of few token ids."""
        value = (
            f"I(row; column) = {self.information:.3f} of at most {self.most:.2f} nats (shuffled: "
            f"{self.null:.3f})"
        )
        if self.information <= self.null:
            return (
                "the row key predicts the column key no better than by chance with "
                f"{self.ids:,} token ids, {value}"
            )
        return f"the row key predicts the column key, {value}"

    def draw(self) -> go.Figure:
        """Draw the map, with bars for the column keys above it and the row keys to its right."""
        rows, columns = self.counts.shape
        pool = self._pool
        load = self.counts * (rows * columns / self.counts.sum())
        load = average_blocks(load, pool)
        with np.errstate(divide="ignore"):
            levels = np.where(load > 0, np.log10(load), np.nan)
        floor = float(np.nanmax(levels)) - DECADES
        gap = 0.035
        across = 0.82 * (1 - gap) * (style.WIDTH - 60 - 14)
        side = min(across * load.shape[0] / load.shape[1], TALLEST)
        above, margins = 64, {"t": 58, "b": 100}
        fig = make_subplots(
            rows=2,
            cols=2,
            row_heights=[above, side],
            column_widths=[0.82, 0.18],
            horizontal_spacing=gap,
            vertical_spacing=10 / (above + side + 10),
            specs=[[{}, None], [{}, {}]],
            figure=style.new_figure(round(above + side + 10 + margins["t"] + margins["b"])),
        )
        fig.add_heatmap(
            # At least 0, since plotly uses the diverging scale for values of both signs.
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
            y=self.column_share,
            hovertemplate="column %{x}: %{y:.2%}<extra></extra>",
            row=1,
            col=1,
            **bars,
        )
        fig.add_bar(
            x=self.row_share,
            y=np.arange(rows),
            orientation="h",
            hovertemplate="row %{y}: %{x:.2%}<extra></extra>",
            row=2,
            col=2,
            **bars,
        )
        uniform = {"type": "line", "line": {"width": 1.5, "dash": "dot", "color": style.VERMILLION}}
        for ends in (
            {
                "x0": 0,
                "x1": 1,
                "xref": "x domain",
                "y0": 1 / columns,
                "y1": 1 / columns,
                "yref": "y",
            },
            {"x0": 1 / rows, "x1": 1 / rows, "xref": "x3", "y0": 0, "y1": 1, "yref": "y3 domain"},
        ):
            fig.add_shape(uniform | ends)
        along, down = [-0.5, columns - 0.5], [rows - 0.5, -0.5]
        fig.update_xaxes(range=along, showgrid=False, col=1)
        # Cells are squares in windows of any width, and the bars stay beside their cells.
        fig.update_xaxes(matches="x2", showticklabels=False, ticks="", row=1, col=1)
        fig.update_xaxes(title_text="column key", row=2, col=1)
        fig.update_yaxes(range=down, showgrid=False, row=2)
        fig.update_yaxes(title_text="row key", row=2, col=1)
        if side < TALLEST:
            fig.update_yaxes(scaleanchor="x2", row=2, col=1)
        fig.update_yaxes(matches="y2", showticklabels=False, ticks="", row=2, col=2)
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


def map_load(found: PairedChoices, rng: np.random.Generator) -> LoadMap:
    """Map the choices of a layer on its grid.

    Args:
        found: the choices.
        rng: draws the tokens that are compared, and shuffles.
    """
    experts, (rows, columns) = found.experts, found.shape
    counts = np.bincount(experts.ravel(), minlength=rows * columns).reshape(rows, columns)
    compared = found.sample(LABELS // experts.shape[1], rng)
    row, column = np.divmod(compared.experts, columns)
    joint = count_joint(row.ravel(), column.ravel())
    # Which of another token's columns meets which row is random, too.
    null = [
        mutual_information(count_joint(row.ravel(), rng.permuted(other, axis=1).ravel()))
        for other in (column[exchange_ids(compared.ids, rng)] for _ in range(ROUNDS))
    ]
    return LoadMap(
        layer=found.layer,
        kind=found.kind,
        tokens=len(experts),
        per_token=experts.shape[1],
        row_share=compute_shares(counts.sum(1)),
        column_share=compute_shares(counts.sum(0)),
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


def average_blocks(
    load: Float[np.ndarray, "rows columns"], pool: int
) -> Float[np.ndarray, "high wide"]:
    """Return the mean of each pool × pool block; blocks at the far edges may be smaller."""
    if pool == 1:
        return load
    sums, sizes = load, np.ones_like(load)
    for axis in (0, 1):
        starts = np.arange(0, load.shape[axis], pool)
        sums, sizes = (np.add.reduceat(part, starts, axis) for part in (sums, sizes))
    return sums / sizes
