"""Horizontal bars with their values, a line for each."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Shaped

from analysis.figures.axes import Axis, add_level, new_canvas
from analysis.figures.pairs import Dots
from analysis.figures.theme import COLORS, MUTED, VERMILLION, make_whiskers

LINE = 30
"""Height of a line, px."""
PATTERNS = ("", "/", ".", "x", "\\", "-", "+", "|")
"""Patterns that go with the colours of stacked bars, so that none relies on colour alone."""


@dataclass(frozen=True)
class Bars:
    """A named series of bars, one per line.

    Attributes:
        values: one per line, from the top; NaN where there is none.
        ends: low and high of an interval around each.
        texts: written beside the bars.
        quiet: whether they are muted, since they are there to compare with.
        notes: for the hover text of each.
    """

    name: str
    values: Shaped[np.ndarray, " n"]
    ends: Shaped[np.ndarray, "n 2"] | None = None
    texts: Sequence[str] | None = None
    quiet: bool = False
    notes: Sequence[str] | None = None


def bars(
    names: Sequence[str],
    series: Sequence[Bars],
    axis: Axis,
    *,
    marks: Dots | None = None,
    levels: Mapping[str, float] | None = None,
    stacked: bool = False,
    line: int = LINE,
    title: str = "",
) -> go.Figure:
    """Draw bars, a line for each name, the first on top.

    Args:
        axis: of the values; leave room for the texts beside the bars.
        marks: a diamond on each line, to compare with.
        levels: values to compare with, drawn as dotted lines.
        stacked: whether the bars of a line stand end to end, with patterns.
        line: height of a line, px.
        title: of the lines' axis.
    """
    legend = [one.name for one in series] + ([marks.name] if marks else []) + list(levels or {})
    height = max(2, len(names)) * line + 10
    canvas = new_canvas([""], [height], legend=legend, names_beside=names)
    fig, lines = canvas.fig, np.arange(len(names))
    for name, level in (levels or {}).items():
        add_level(canvas, 0, name, level, axis.shown, upright=True)
    for i, one in enumerate(series):
        values = np.asarray(one.values, np.float64)
        look = {"color": MUTED if one.quiet else COLORS[i % len(COLORS)]}
        pattern = {"shape": PATTERNS[i % len(PATTERNS)], "size": 6, "solidity": 0.2}
        fig.add_bar(
            x=values,
            y=lines,
            orientation="h",
            marker={**look, "opacity": 0.6 if one.quiet else 1}
            | ({"pattern": {**pattern, "fillmode": "overlay"}} if stacked else {}),
            error_x=None if one.ends is None else make_whiskers(values, one.ends),
            hovertext=list(one.notes or names),
            hovertemplate=f"%{{hovertext}}, {html.escape(one.name)}: %{{x:{axis.shown}}}"
            "<extra></extra>",
            **canvas.enter(one.name),
        )
        for place, text in enumerate(one.texts or ()):
            end = values[place] if one.ends is None else np.fmax(*one.ends[place])
            beside = [end, values[place]] + ([float(marks.values[place])] if marks else [])
            if np.isfinite(values[place]):
                fig.add_annotation(
                    text=text, x=np.nanmax(beside), y=place, xanchor="left", xshift=8
                )
    if marks:
        fig.add_scatter(
            x=marks.values,
            y=lines,
            mode="markers",
            marker={"symbol": "diamond", "size": 8, "color": VERMILLION},
            text=list(marks.notes or names),
            hovertemplate=f"%{{text}}, {marks.name}: %{{x:{axis.shown}}}<extra></extra>",
            **canvas.enter(marks.name),
        )
    shown = [v for one in series for v in np.asarray(one.values, float).tolist()]
    shown += [v for one in series if one.ends is not None for v in one.ends.flatten().tolist()]
    shown.append(0.0)  # where bars begin
    canvas.finish(axis, Axis(title), 0, (shown, ()))
    fig.update_yaxes(
        range=[len(names) - 0.4, -0.6],
        tickvals=lines,
        ticktext=[html.escape(name) for name in names],
        showgrid=False,
        ticks="",
        automargin="left",
    )
    return fig.update_layout(
        barmode="stack" if stacked else "group" if len(series) > 1 else "overlay",
        bargap=0.25 if stacked else 0.4,
        legend_traceorder="normal",
    )
