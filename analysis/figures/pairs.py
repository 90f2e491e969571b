"""Dots with intervals, a line for each thing that is compared."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Shaped

from analysis.figures.axes import Axis, add_level, new_canvas
from analysis.figures.theme import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    VERMILLION,
    make_whiskers,
)

MARKS = (
    {"symbol": "circle", "color": BLUE, "size": 9},
    {"symbol": "diamond-open", "color": VERMILLION, "size": 10, "line": {"width": 2}},
    {"symbol": "square", "color": GREEN, "size": 8},
    {"symbol": "triangle-up-open", "color": PURPLE, "size": 10, "line": {"width": 2}},
    {"symbol": "x", "color": ORANGE, "size": 8},
    {"symbol": "star-open", "color": VERMILLION, "size": 10, "line": {"width": 2}},
)
"""Markers in turn, starting over after the last; readable on light pages and on dark."""
LOOKS = {
    "chance": {"symbol": "line-ns-open", "color": MUTED, "size": 13, "line": {"width": 2}},
    "placebo": {"symbol": "x-thin-open", "color": MUTED, "size": 8, "line": {"width": 1.5}},
    "hollow": {"symbol": "circle-open", "color": VERMILLION, "size": 9, "line": {"width": 2}},
    "diamond": {"symbol": "diamond", "color": VERMILLION, "size": 10},
    "run": {"symbol": "circle-open", "color": MUTED, "size": 7},
    "unsolved": {"symbol": "triangle-right-open", "color": MUTED, "size": 7},
}
"""Markers of what values are compared with; they stand at the place of the dots before them."""
LINE, MARK = 14, 12
"""Height of a line, px, and additional height per series."""
STEP, SPREAD = 0.24, 0.3
"""Distance of the series of a line, in lines, and their largest distance from its middle."""
PANEL = 44
"""Height of the titles of panels side by side, px."""


@dataclass(frozen=True)
class Dots:
    """A named series with a value for each line.

    Attributes:
        values: one per line, from the top, or as many as `lines`; NaN where there is none.
        ends: low and high of an interval around each; NaN where there is none.
        look: "dot" takes the next marker; the others are for what it is compared with, and stand
            at the height of the series before.
        notes: for the hover text of each.
        lines: the line of each value, from 0, where a line has several or none.
    """

    name: str
    values: Shaped[np.ndarray, " n"]
    ends: Shaped[np.ndarray, "n 2"] | None = None
    look: Literal["dot", "chance", "placebo", "hollow", "diamond", "run", "unsolved"] = "dot"
    notes: Sequence[str] | None = None
    lines: Shaped[np.ndarray, " n"] | None = None


@dataclass(frozen=True)
class Pairs:
    """A panel of dots.

    Attributes:
        levels: values to compare with, drawn as dotted lines; "" names a thin one, such as zero.
    """

    dots: Sequence[Dots]
    axis: Axis
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)


def pairs(
    names: Sequence[str],
    panels: Pairs | Sequence[Pairs],
    *,
    title: str = "",
    joined: bool = False,
    remarks: Sequence[str] = (),
) -> go.Figure:
    """Draw dots, a line for each name, the first on top, panels side by side.

    Args:
        title: of the lines' axis.
        joined: whether the dots of a line stand at one height and are joined by a stroke.
        remarks: a short text for each line, to the right of its dots; with one panel, whose series
            have a dot in each line.
    """
    panels = [panels] if isinstance(panels, Pairs) else panels
    most = max(sum(dots.look == "dot" for dots in panel.dots) for panel in panels)
    high = LINE + (MARK * max(most, 1) if not joined else 16)
    legend = [dots.name for panel in panels for dots in panel.dots]
    legend += [name for panel in panels for name in panel.levels]
    canvas = new_canvas(
        [panel.title for panel in panels],
        [max(2, len(names)) * high + 20],
        legend=legend,
        across=len(panels),
        share_y=True,
        names_beside=names,
    )
    lines = np.arange(len(names))
    for i, panel in enumerate(panels):
        row, column = canvas.places[i]
        for name, level in panel.levels.items():
            add_level(canvas, i, name, level, panel.axis.shown, upright=True)
        series = [j for j, dots in enumerate(panel.dots) if dots.look == "dot"]
        half = 0.0 if joined else min(SPREAD, STEP / 2 * (len(series) - 1))
        offsets = np.linspace(-half, half, len(series)) if series else np.zeros(1)
        if joined:
            canvas.fig.add_trace(_join(panel.dots, lines), row=row, col=column)
        order = -1
        for dots in panel.dots:
            order += dots.look == "dot"
            mark = MARKS[order % len(MARKS)] if dots.look == "dot" else LOOKS[dots.look]
            values = np.asarray(dots.values, np.float64)
            whiskers = None
            if dots.ends is not None:
                whiskers = {**make_whiskers(values, dots.ends, 1.2, 3), "color": mark["color"]}
            at = lines if dots.lines is None else np.asarray(dots.lines)
            canvas.fig.add_scatter(
                x=values,
                y=at + offsets[max(order, 0)],
                mode="markers",
                marker=mark,
                error_x=whiskers,
                cliponaxis=False,
                text=list(dots.notes or [names[line] for line in at.astype(int)]),
                hovertemplate=f"%{{text}}, {html.escape(dots.name)}: %{{x:{panel.axis.shown}}}"
                "<extra></extra>",
                **canvas.enter(dots.name),
                row=row,
                col=column,
            )
        shown = [v for dots in panel.dots for v in np.asarray(dots.values, float).tolist()]
        shown += [
            v for dots in panel.dots if dots.ends is not None for v in dots.ends.flatten().tolist()
        ]
        canvas.finish(panel.axis, Axis(title), i, ([*shown, *panel.levels.values()], ()))
    canvas.fig.update_yaxes(
        range=[len(names) - 0.4, -0.6],
        tickvals=lines,
        ticktext=[html.escape(name).replace("\n", "<br>") for name in names],
        showgrid=False,
        ticks="",
    )
    canvas.fig.update_xaxes(nticks=4 if len(panels) > 1 else None, tickangle=0)
    canvas.fig.update_yaxes(automargin="left", col=1)
    if remarks:
        _add_remarks(canvas.fig, panels[0], remarks)
    return canvas.fig


def _join(series: Sequence[Dots], lines: np.ndarray) -> go.Scatter:
    """Return a stroke from the smallest to the largest dot of each line."""
    values = np.stack([np.asarray(dots.values, np.float64) for dots in series])
    gap = np.full(len(lines), np.nan)
    x = np.stack([np.nanmin(values, 0), np.nanmax(values, 0), gap], 1).ravel()
    return go.Scatter(
        x=x,
        y=np.repeat(lines, 3).astype(float),
        mode="lines",
        line={"color": MUTED, "width": 2},
        showlegend=False,
        hoverinfo="skip",
    )


def _add_remarks(fig: go.Figure, panel: Pairs, remarks: Sequence[str]) -> None:
    """Write a remark beside the dots of each line, to the side where there is more room."""
    if not remarks:
        return
    ends = [np.asarray(d.values, np.float64) if d.ends is None else d.ends.T for d in panel.dots]
    values = np.vstack(ends)
    every = panel.axis.settings(values.ravel().tolist()).get("range")
    shown = every or (np.nanmin(values), np.nanmax(values))
    for line, remark in enumerate(remarks):
        low, high = np.nanmin(values[:, line]), np.nanmax(values[:, line])
        right = high + low < shown[0] + shown[1]
        fig.add_annotation(
            text=html.escape(remark),
            x=high if right else low,
            y=line,
            xanchor="left" if right else "right",
            xshift=10 if right else -10,
        )
