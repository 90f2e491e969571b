"""Curves: quantities along one axis, by step, position, frequency or size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Shaped

from analysis.figures.axes import FOOT, Axis, add_level, new_canvas
from analysis.figures.theme import COLORS, DASHES, MUTED, SYMBOLS, make_whiskers

BAND = "rgba(128, 134, 145, 0.28)"
"""`theme.MUTED`, translucent."""
FEW = 60
"""Maximum number of points that have a marker each."""


@dataclass(frozen=True)
class Line:
    """A named quantity. Lines of one name share colour and entry in the legend.

    Attributes:
        name: in the legend; "" for none.
        y: values; NaN where there is none.
        ends: low and high of an interval around each.
        shape: "line" has markers where there is room, "band" shows its interval as a band,
            "points" have no line, "stairs" keep a value until the next.
        look: number of colour, dash and symbol; None: the next ones; −1: muted, for what is in the
            background or only to compare with.
        notes: for the hover text of each point.
        labels: written beside each point of `points`, and on which side.
    """

    name: str
    x: Shaped[np.ndarray, " n"]
    y: Shaped[np.ndarray, " n"]
    ends: Float[np.ndarray, "n 2"] | None = None
    shape: Literal["line", "band", "points", "stairs"] = "line"
    look: int | None = None
    notes: Sequence[str] | None = None
    labels: Sequence[tuple[str, Literal["left", "right"]]] | None = None


@dataclass(frozen=True)
class Curves:
    """A panel of curves.

    Attributes:
        title: above it; "" for none.
        levels: values to compare with, drawn as dotted lines; "" names a thin one, such as zero.
        x: its horizontal axis, where it has one of its own.
    """

    lines: Sequence[Line]
    y: Axis
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)
    x: Axis | None = None
    height: int = 240


def curves(panels: Sequence[Curves], x: Axis, *, across: int = 1) -> go.Figure:
    """Draw curves, a panel for each quantity.

    Args:
        panels: row by row.
        x: the horizontal axis of all panels that have none of their own.
    """
    names = [line.name for panel in panels for line in panel.lines]
    names += [name for panel in panels for name in panel.levels]
    looks = {name: i for i, name in enumerate(dict.fromkeys(filter(None, names)))}
    own = any(panel.x for panel in panels)
    titled = any(panel.title for panel in panels)
    alike = across > 1 and all(panel.y == panels[0].y for panel in panels)
    canvas = new_canvas(
        [panel.title for panel in panels],
        [panel.height for panel in panels[::across]],
        legend=names,
        across=across,
        gap=70 if own else 50 if across > 1 else 34 if titled else 24,
        foot=FOOT,
        share_x=across == 1 and not own,
        share_y=alike,
    )
    for i, panel in enumerate(panels):
        row, column = canvas.places[i]
        axis = panel.x or x
        for name, level in panel.levels.items():
            add_level(canvas, i, name, level, panel.y.shown, upright=False)
        for line in panel.lines:
            look = looks.get(line.name, 0) if line.look is None else line.look
            for trace in _draw_line(line, look, axis, panel.y):
                entry = canvas.enter(line.name) if trace.hoverinfo != "skip" else {}
                canvas.fig.add_trace(trace.update(entry), row=row, col=column)
        shown = [value for line in panel.lines for value in line.x.tolist()]
        values = [v for one in (panels if alike else [panel]) for v in _list_values(one)]
        canvas.finish(axis, panel.y, i, (shown, values), own=own)
    return canvas.fig


def offer_views(views: Mapping[str, go.Figure]) -> go.Figure:
    """Return the first of some figures; pages let their reader choose among them by name.

    Args:
        views: figures of one panel each, with the same traces; their horizontal axes may differ.
    """
    first, meta = next(iter(views.values())), []
    for name, figure in views.items():
        traces: Any = figure.data
        axis = {"xaxis": figure.layout["xaxis"].to_plotly_json()}
        data = [trace.to_plotly_json() for trace in traces]
        meta.append({"name": name, "data": data, "layout": axis})
    return first.update_layout(meta={"views": meta}) if len(views) > 1 else first


def _list_values(panel: Curves) -> list[float]:
    """Return what stands on a panel's vertical axis: values, their intervals, levels."""
    found = [*panel.levels.values()]
    for line in panel.lines:
        found += line.y.tolist() + ([] if line.ends is None else line.ends.flatten().tolist())
    return found


def _draw_line(line: Line, look: int, x: Axis, y: Axis) -> list[go.Scatter]:
    """Return the traces of a line: a band below it if it has one, and itself."""
    muted = look < 0
    color = MUTED if muted else COLORS[look % len(COLORS)]
    turned = look + look // len(COLORS)  # lines of one colour differ in dash and symbol
    at, ends = x.place(line.x), line.ends
    found = []
    if ends is not None and line.shape == "band":
        known = ~np.isnan(ends).any(-1)
        found.append(
            go.Scatter(
                x=np.concatenate([at[known], at[known][::-1]]),
                y=np.concatenate([ends[known, 1], ends[known, 0][::-1]]),
                fill="toself",
                fillcolor=BAND,
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
            )
        )
    few = len(at) <= FEW
    marked, faint = few and not muted, muted or (not few and line.shape == "points")
    modes = {"points": "markers+text" if line.labels else "markers", "stairs": "lines"}
    notes = line.notes or [line.name] * len(at)
    # Of points there may be so many that whiskers with caps hide them.
    whiskers = (0.8, 0) if line.shape == "points" else (1.5, 5)
    where = x.title.split(",")[0] or "x"
    found.append(
        go.Scatter(
            x=at,
            y=np.asarray(line.y, np.float64),
            mode=modes.get(line.shape, "lines+markers" if marked else "lines"),
            line={
                "color": color,
                "width": 1.2 if muted else 2,
                "dash": "solid" if muted else DASHES[turned % len(DASHES)],
                "shape": "hv" if line.shape == "stairs" else "linear",
            },
            marker={
                "symbol": SYMBOLS[turned % len(SYMBOLS)],
                "size": 7 if few else 5,
                "color": color,
            },
            opacity=0.7 if faint else 1,
            error_y=make_whiskers(np.asarray(line.y, np.float64), ends, *whiskers)
            if ends is not None and line.shape != "band"
            else None,
            cliponaxis=False,
            text=[label for label, _ in line.labels] if line.labels else None,
            textposition=[f"middle {side}" for _, side in line.labels] if line.labels else None,
            hovertext=list(notes),
            customdata=np.asarray(line.x, np.float64),
            hovertemplate=f"%{{hovertext}}, {where} %{{customdata:,.4~g}}: %{{y:{y.shown}}}"
            "<extra></extra>",
        )
    )
    return found
