"""Plots of heads: dots with one row per head and one panel per quantity."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.plots import style
from analysis.words import name_head

LINES = 24
"""Maximum number of heads with a row of their own; with more, the heads of a layer share one."""
LINE, MARK = 14, 12
"""Height of a row, px, and additional height per series."""
MARKS = (
    {"symbol": "circle", "color": style.BLUE, "size": 9},
    {"symbol": "diamond-open", "color": style.VERMILLION, "size": 10, "line": {"width": 2}},
    {"symbol": "square", "color": style.GREEN, "size": 8},
    {"symbol": "triangle-up-open", "color": style.PURPLE, "size": 10, "line": {"width": 2}},
    {"symbol": "x", "color": style.ORANGE, "size": 8},
    {"symbol": "cross-open", "color": style.MUTED, "size": 10, "line": {"width": 2}},
)
"""Markers of the series in turn, starting over after the last; readable on light and dark."""
STEP, SPREAD = 0.24, 0.3
"""Distance of the series of a head, in rows, and their largest distance from its row."""
TICKS = 3
"""Maximum number of labels of a logarithmic axis: panels are narrow on a phone."""


@dataclass(frozen=True)
class Panel:
    """A quantity of all heads.

    Attributes:
        title: one or two short lines, split by a line break.
        values: one array per series, NaN where a head has no value.
        ends: of the axis, in its unit even if it is logarithmic.
        ticks: labels of a linear axis by place; None: plotly chooses.
        half_widths: of intervals around the first series.
        chance: place of the reference line.
        log: whether the axis is logarithmic.
        shown: plotly's number format for hover texts.
    """

    title: str
    values: tuple[Float[np.ndarray, " h"], ...]
    ends: tuple[float, float]
    ticks: dict[float, str] | None = None
    half_widths: Float[np.ndarray, " h"] | None = None
    chance: float | None = None
    log: bool = False
    shown: str = ".3g"


def draw_dots(
    layers: Int[np.ndarray, " h"],
    heads: Int[np.ndarray, " h"],
    panels: Sequence[Panel],
    series: Sequence[str],
    chance: str,
    axis: str = "",
) -> go.Figure:
    """Draw panels side by side, the first layer's first head on top.

    Args:
        layers: the layer of each head.
        heads: the index of each head in its layer.
        panels: the quantities.
        series: names of the series in every panel.
        chance: name of the reference line.
        axis: common title of the panels' axes.
    """
    lines, labels = place_heads(layers, heads)
    fig = make_subplots(
        rows=1,
        cols=len(panels),
        shared_yaxes=True,
        horizontal_spacing=0.05,
        figure=style.new_figure(height=max(320, 184 + (LINE + MARK * len(series)) * len(labels))),
    )
    half = min(SPREAD, STEP / 2 * (len(series) - 1))
    offsets = np.linspace(-half, half, len(series))
    first = next((panel for panel in panels if panel.chance is not None), None)
    names = list(map(name_head, layers, heads))
    for column, panel in enumerate(panels, start=1):
        if panel.chance is not None:
            fig.add_scatter(
                x=[panel.chance] * 2,
                y=[-0.6, len(labels) - 0.4],
                mode="lines",
                line={"color": style.MUTED, "width": 1.5, "dash": "dash"},
                name=chance,
                legendgroup=chance,
                showlegend=panel is first,
                hovertemplate=f"{chance}: %{{x:{panel.shown}}}<extra></extra>",
                row=1,
                col=column,
            )
        for i, values in enumerate(panel.values):
            whiskers = None if i or panel.half_widths is None else panel.half_widths
            fig.add_scatter(
                x=values,
                y=lines + offsets[i],
                mode="markers",
                marker=MARKS[i % len(MARKS)],
                error_x=None
                if whiskers is None
                else {"array": np.nan_to_num(whiskers), "thickness": 1.2, "width": 3},
                name=html.escape(series[i]),
                legendgroup=series[i],
                showlegend=column == 1,
                cliponaxis=False,
                text=names,
                hovertemplate=f"%{{text}}: %{{x:{panel.shown}}}<extra></extra>",
                row=1,
                col=column,
            )
        ends = np.log10(panel.ends) if panel.log else panel.ends
        ticks = choose_log_ticks(*panel.ends) if panel.log else panel.ticks
        fig.update_xaxes(
            range=list(ends),
            type="log" if panel.log else "linear",
            tickvals=None if ticks is None else list(ticks),
            ticktext=None if ticks is None else list(ticks.values()),
            nticks=4,
            tickangle=0,
            row=1,
            col=column,
        )
        fig.add_annotation(
            text=panel.title.replace("\n", "<br>"),
            xref=f"x{column if column > 1 else ''} domain",
            yref="paper",
            x=0.5,
            y=1,
            yanchor="bottom",
            yshift=4,
        )
    fig.update_yaxes(
        range=[len(labels) - 0.4, -0.6],
        tickvals=list(range(len(labels))),
        showline=False,
        ticks="",
    )
    fig.add_annotation(text=axis, xref="paper", yref="paper", x=0.5, y=0, yanchor="top", yshift=-22)
    title = "layer.head" if len(labels) == len(layers) else "layer"
    fig.update_yaxes(ticktext=labels, title_text=title, col=1)
    return fig.update_layout(
        margin={"l": 56, "t": 88, "b": 84},
        legend={"y": 0, "yref": "container", "yanchor": "bottom"},
    )


def place_heads(
    layers: Int[np.ndarray, " h"], heads: Int[np.ndarray, " h"]
) -> tuple[Float[np.ndarray, " h"], list[str]]:
    """Return the row of each head, and the labels of the rows."""
    if len(layers) <= LINES:
        return np.arange(len(layers), dtype=float), name_heads(layers, heads)
    distinct, line = np.unique(layers, return_inverse=True)
    return line.astype(float), [str(layer) for layer in distinct.tolist()]


def name_heads(layers: Int[np.ndarray, " h"], heads: Int[np.ndarray, " h"]) -> list[str]:
    """Return "layer.head" for each head."""
    return [f"{layer}.{head}" for layer, head in zip(layers, heads, strict=True)]


def choose_log_ticks(low: float, high: float) -> dict[float, str]:
    """Choose labels of a logarithmic axis by place: powers of ten, or 1, 2 and 5 times one.

    There are two or three, as evenly spaced as possible; fewer on an axis too short for them.
    """
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        places = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(places) > 1:
            break
    else:
        places = [float(f"{np.sqrt(low * high):.2g}")]
    step = -(-len(places) // TICKS)
    return {place: f"{place:g}" for place in places[(len(places) - 1) % step :: step]}
