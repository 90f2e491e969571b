"""How lines of a sweep's figures look: colour, dash and marker together tell them apart."""

import html
from collections.abc import Collection
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analysis.plots.style import COLORS, DASHES, SYMBOLS, make_whiskers

HEIGHT = 330
"""Height of a figure with one panel, without its legend, px."""
SHARES: dict[str, Any] = {"range": [-0.04, 1.06], "tickformat": ".0%"}
"""An axis of shares, with room for markers at both ends."""
LEGEND_ROW = 22
"""Height of a row of the legend, px."""
LEGEND_LETTER, LEGEND_SIGN, LEGEND_WIDTH = 6.3, 40, 530
"""Widths of a letter and of the sign beside it, and of all entries of a row, px."""


def choose_look(number: int) -> dict[str, Any]:
    """Return colour, dash and symbol of a line; two lines of one colour differ in the others."""
    turn = number // len(COLORS)
    return {
        "color": COLORS[number % len(COLORS)],
        "dash": DASHES[turn % len(DASHES)],
        "symbol": SYMBOLS[(number + turn) % len(SYMBOLS)],
    }


def add_line(
    fig: go.Figure,
    name: str,
    number: int,
    x: list[Any],
    y: list[float],
    ends: list[tuple[float, float]],
    said: list[str],
    **place: Any,
) -> None:
    """Add a line with markers and whiskers.

    Args:
        fig: to add it to.
        name: of the line.
        number: of its look.
        x: positions.
        y: values.
        ends: of their intervals.
        said: what is said of each point when a pointer is over it.
        place: row, col and whether it has an entry in the legend.
    """
    look, label = choose_look(number), html.escape(name)
    fig.add_scatter(
        x=x,
        y=y,
        mode="lines+markers",
        line={"color": look["color"], "dash": look["dash"], "width": 2},
        marker={"symbol": look["symbol"], "size": 7},
        error_y=make_whiskers(np.array(y), np.array(ends, dtype=float).reshape(-1, 2), 1, 3),
        name=label,
        legendgroup=label,
        customdata=[html.escape(text) for text in said],
        hovertemplate="%{customdata}<extra></extra>",
        **place,
    )


def put_legend_below(fig: go.Figure, names: Collection[str], plot: int) -> go.Figure:
    """Put the legend below the plot, in as many columns as its names leave room for.

    Args:
        fig: the figure.
        names: entries of the legend.
        plot: height of the figure without the legend, px.
    """
    width = LEGEND_LETTER * max(map(len, names), default=0)
    columns = max(1, min(3, int(LEGEND_WIDTH / (width + LEGEND_SIGN))))
    rows = -(-len(names) // columns) * LEGEND_ROW
    inner = plot - 64 - 60
    return fig.update_layout(
        height=plot + rows,
        margin_b=60 + rows,
        legend={"y": -52 / inner, "yanchor": "top", "entrywidth": width},
    )
