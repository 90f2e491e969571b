"""Named lines: one per item, the first on top, or dotted ones at accuracies to compare with."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from analysis.plots.style import LABEL, MUTED
from analysis.words import percent

REFERENCE = {"color": MUTED, "width": 1.2, "dash": "dot"}
"""The line of what needs no training."""
LINE = 14
"""Height of a label, pixels."""
MARKER = 7
"""Pixels between a level and labels outside of it: no marker on the level touches them."""
_PLAIN = {"showgrid": False, "ticks": "", "automargin": "left"}


def name_lines(
    fig: go.Figure, names: Sequence[str], at: Sequence[float] | None = None, **axis: Any
) -> None:
    """Name the lines of a figure.

    Args:
        fig: the figure.
        names: one per line.
        at: height of each line, ascending; None: 0, 1, …
        axis: other settings of the axis; `row` and `col` of a panel.
    """
    at = range(len(names)) if at is None else at
    ends = [at[-1] + 0.6, -0.6]
    fig.update_yaxes(range=ends, tickvals=list(at), ticktext=names, **_PLAIN, **axis)


def order_lines(fig: go.Figure, names: Sequence[str]) -> None:
    """Order the lines of a figure whose vertical coordinates are names."""
    fig.update_yaxes(categoryorder="array", categoryarray=names[::-1], **_PLAIN)


def draw_references(
    fig: go.Figure, levels: Mapping[str, float], spans: Mapping[str, tuple[float, float]]
) -> None:
    """Draw a dotted line at each accuracy; the axis leaves room for their names.

    Names of accuracies near 0 or 1 stand outside of [0, 1], where no curve passes, in the order of
    their lines.

    Args:
        fig: the figure.
        levels: accuracies by name.
        spans: where on the x axis a line begins and ends, for those that do not cross the figure.
    """
    high, low = 0, 0
    for name, level in sorted(levels.items(), key=lambda item: abs(item[1] - 0.5)):
        if name in spans:
            x0, x1 = spans[name]
            fig.add_shape(x0=x0, x1=x1, y0=level, y1=level, line=REFERENCE, layer="below")
        else:
            fig.add_hline(level, line=REFERENCE, layer="below")
        side = 1 if name in spans else 0
        above, below = level > 0.9, level < 0.1
        fig.add_annotation(
            text=html.escape(f"{name} {percent(level)}"),
            x=side,
            xref="x domain",
            xanchor="right" if side else "left",
            y=1 if above else 0 if below else level,
            yanchor="top" if below else "bottom",
            yshift=(LINE * high + MARKER) * above - (LINE * low + MARKER) * below,
            **LABEL,
        )
        high, low = high + above, low + below
    ends = [-_leave_room(low), 1 + _leave_room(high)]
    fig.update_yaxes(tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%", range=ends)


def _leave_room(labels: int) -> float:
    """Return how far an axis of accuracies goes past 0 or 1, for some labels above each other."""
    return 0.1 + 0.06 * max(labels, 1)
