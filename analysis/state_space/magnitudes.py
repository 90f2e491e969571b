"""How large the entries of an SSD layer's matrix are."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Subject, Words
from analysis.plain import figure_only
from analysis.plots.heatmaps import Heatmap, Picture, choose_pool, draw_heatmap, pool_matrix
from analysis.state_space.recurrence import Recurrence
from analysis.words import percent

LEAST = float(np.finfo(np.float32).tiny)
"""What stands for 0, which has no logarithm."""
DECADES = 6
"""How far below the largest magnitude colours end."""


@dataclass(frozen=True)
class Magnitudes(Finding):
    """log₁₀|M̃| of a layer on the first row.

    Attributes:
        layer: index of the block.
        largest: log₁₀ of the largest magnitude.
        floor: log₁₀ of the magnitude in whose colour all smaller ones are drawn.
        median: log₁₀ of the median magnitude of the cells drawn.
        below: share of the cells below the floor, in [0, 1].
        shown: the heat map.
    """

    layer: int
    largest: float
    floor: float
    median: float
    below: float
    shown: Heatmap = figure_only()

    def describe(self) -> Words:
        """Say how far below the largest magnitude most entries lie."""
        pool = self.shown.picture.pool
        title = f"Layer {self.layer} · SSD · log₁₀|M̃|, without D, first test row"
        title += f", max over {pool} × {pool}" if pool > 1 else ""
        cells = "entries" if pool == 1 else "cells"
        says = f"Half of the {cells} lie {self.largest - self.median:.2g} decades or more below "
        says += f"the largest, {10**self.largest:.2g}"
        says += (
            f"; {percent(self.below)} are below the floor of the colours." if self.below else "."
        )
        if self.largest <= np.log10(LEAST):
            says = f"All {cells} are 0."
        elif self.median == self.largest:
            says = f"At least half of the {cells} are as large as the largest, "
            says += f"{10**self.largest:.2g}."
        reading = (
            f"Colour is log₁₀|M̃|, up to {self.largest:.1f}. It starts at the floor, "
            f"{self.floor:.1f}: the smallest magnitude, or {DECADES} decades below the largest. "
            "Smaller entries have the floor's colour. A head that forgets fades away from the "
            "diagonal. Ticks on the left mark query rows."
        )
        return Words(title, says, reading, f"Heat map of {title}, lower triangle. {says}")

    def draw(self) -> go.Figure:
        """Draw one heat map of logarithms per head."""
        fig = draw_heatmap(self.shown, self.layer)
        ticks = np.arange(np.ceil(self.floor), np.floor(self.largest) + 1)
        fig.update_traces(
            hovertemplate="row %{y}, column %{x}: log₁₀|M̃| = %{z:.2f}<extra></extra>",
            selector={"type": "heatmap"},
        )
        return fig.update_layout(
            meta={**fig.to_dict()["layout"]["meta"], "value": "log₁₀|M̃|"},
            coloraxis={
                # By itself plotly would take the diverging scale: logarithms have both signs.
                "autocolorscale": False,
                "colorscale": "cividis",
                "cmin": self.floor,
                "cmax": self.largest,
                "colorbar": {
                    "tickvals": ticks.tolist(),
                    "ticktext": [f"10<sup>{tick:.0f}</sup>" for tick in ticks],
                },
            },
        )


def measure_magnitudes(layer: Recurrence, subject: Subject) -> Magnitudes:
    """Measure log₁₀|M̃| of a layer on the subject's first row."""
    seq_len = layer.dt.shape[1]
    pool = choose_pool(layer.n_heads, seq_len)
    place, parts = np.arange(seq_len), []
    for rows, block in layer.blocks(0, pool):
        causal = np.where(place <= place[rows, None], block.cpu().numpy(), np.float32(np.nan))
        parts.append(pool_matrix(causal, pool))
    size = np.abs(np.concatenate(parts, axis=1))
    entries = size[~np.isnan(size)]
    smallest, median, largest = (
        float(np.log10(max(float(number), LEAST)))
        for number in (entries.min(), np.median(entries), entries.max())
    )
    floor = min(max(largest - DECADES, smallest), largest - 1)
    logs = np.log10(np.maximum(size, np.float32(10**floor)))
    return Magnitudes(
        layer=layer.mixer.layer,
        largest=largest,
        floor=floor,
        median=median,
        below=float((entries < 10**floor).mean()),
        shown=Heatmap.of(subject, Picture(logs, pool, (0, 0), largest, signed=False)),
    )
