"""Axes of figures by frequency: rows of comparisons, columns of wavelengths, panels of layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from analysis.plots.style import GREEN

ROW = 18
"""Height of a row of a heat map, px."""
TOP, BOTTOM = 78, 126
"""Height above and below a heat map, px."""


@dataclass(frozen=True)
class HeatRows:
    """The rows of a layer in a heat map by frequency, one per comparison.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        wavelengths: 2π/θ, tokens.
        values: colour of each cell.
        texts: what the pointer shows of each cell.
    """

    layer: int
    sides: str
    wavelengths: Float[np.ndarray, " m"]
    values: Float[np.ndarray, "c m"]
    texts: list[str]

    @property
    def labels(self) -> list[str]:
        """Names of the rows."""
        place = f"{self.layer} · {self.sides}"
        count = len(self.values)
        return [place] if count == 1 else [f"{place} {c}" for c in range(count)]


def add_heat_rows(fig: go.Figure, panel: int, shown: Sequence[HeatRows]) -> list[str]:
    """Add the rows of some layers to a panel, from 0, of a figure and return their labels."""
    labels: list[str] = []
    axis = name_axis(panel)
    for layer in shown:
        texts = iter(layer.texts)
        fig.add_heatmap(
            x=find_cell_edges(layer.wavelengths),
            y0=len(labels),
            dy=1,
            z=layer.values.astype(np.float32),
            text=[
                [
                    f"layer {label}, wavelength {wave:,.1f} tokens: {next(texts)}"
                    for wave in layer.wavelengths.tolist()
                ]
                for label in layer.labels
            ],
            coloraxis="coloraxis",
            hovertemplate="%{text}<extra></extra>",
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
        )
        labels += layer.labels
    return labels


def lay_out_heat_rows(
    fig: go.Figure,
    wavelengths: Sequence[Float[np.ndarray, " m"]],
    seq_len: int,
    labels: Sequence[Sequence[str]],
    colors: str,
) -> None:
    """Lay out the axes of heat maps by frequency, with a line at the row's length.

    Args:
        fig: the figure, with a panel for each item of `labels`.
        wavelengths: of all layers.
        seq_len: the row's length, tokens.
        labels: of the rows of each panel.
        colors: what the colours mean.
    """
    ends = np.concatenate([find_cell_edges(waves) for waves in wavelengths])
    fig.update_xaxes(
        type="log",
        range=np.log10([ends.min(), ends.max()]).tolist(),
        showgrid=False,
        tickvals=[10**k for k in range(1, 10)],
        tickformat="~s",
    )
    fig.update_yaxes(showgrid=False, ticks="", title_text="layer")
    for panel, names in enumerate(labels):
        bottom = panel == len(labels) - 1
        fig.update_layout(
            {
                f"xaxis{name_axis(panel)}": {
                    "title": {"text": "wavelength 2π/θ, tokens" if bottom else None}
                },
                f"yaxis{name_axis(panel)}": {
                    "range": [len(names) - 0.5, -0.5],
                    "tickvals": list(range(len(names))),
                    "ticktext": names,
                },
            }
        )
        add_line(fig, panel, seq_len)
    add_color_title(fig, colors)
    fig.add_annotation(
        text=f"row: {seq_len:,} tokens",
        x=math.log10(seq_len),
        xref="x",
        y=1,
        yref="y domain",
        yanchor="bottom",
        yshift=2,
    )


def add_line(fig: go.Figure, panel: int, x: float) -> None:
    """Add an upright line to a panel, from 0."""
    fig.add_shape(
        type="line",
        x0=x,
        x1=x,
        y0=0,
        y1=1,
        xref=f"x{name_axis(panel)}",
        yref=f"y{name_axis(panel)} domain",
        line={"color": GREEN, "width": 2},
    )


def add_color_title(fig: go.Figure, text: str) -> None:
    """Add a title between the panels and the colour bar."""
    fig.add_annotation(text=text, x=0.5, xref="paper", y=0, yref="paper", yshift=-74)


def name_axis(panel: int) -> str:
    """Return the number in plotly's names of the axes of a panel, from 0."""
    return "" if panel == 0 else str(panel + 1)


def find_cell_edges(wavelengths: Float[np.ndarray, " m"]) -> Float[np.ndarray, " n"]:
    """Return where the cells of wavelengths end, midway on a logarithmic axis."""
    log = np.log(wavelengths)
    step = np.diff(log) if len(log) > 1 else np.ones(1)
    middle = log[:-1] + np.diff(log) / 2
    return np.exp(np.concatenate([[log[0] - step[0] / 2], middle, [log[-1] + step[-1] / 2]]))
