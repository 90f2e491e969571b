"""Panels of a figure: two side by side with a title each, or stacked with a legend each."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.plots import style

PANELS = 8
"""Maximum number of panels of a figure."""
HEAD = style.HEAD + 26
"""Height above the panels without a legend, px."""
LEGEND, FOOT = 36, 52
"""Height of a legend, and of what is below the panels, px."""


def new_panels(
    titles: Sequence[str], height: int, *, legend: bool = True, foot: int = FOOT
) -> tuple[go.Figure, list[tuple[int, int]]]:
    """Return a figure of empty panels, and the row and column of each.

    Args:
        titles: of the panels.
        height: of a panel, px.
        legend: whether to leave room for a legend above the panels.
        foot: room below the panels, px.
    """
    across = min(2, len(titles))
    down = math.ceil(len(titles) / across)
    head = HEAD + LEGEND * legend
    fig = make_subplots(
        rows=down,
        cols=across,
        subplot_titles=list(titles),
        horizontal_spacing=0.1,
        vertical_spacing=0.0 if down == 1 else 56 / (height * down),
        figure=style.new_figure(height=head + height * down + foot),
    )
    fig.update_annotations(font_size=11)
    fig.update_layout(
        margin={"t": head, "b": foot},
        legend={"y": 1 + 20 / (height * down), "yref": "paper", "yanchor": "bottom"},
    )
    return fig, [(i // across + 1, i % across + 1) for i in range(len(titles))]


def stack_panels(panels: int, height: int, gap: int) -> tuple[int, float]:
    """Return how high stacked panels are with the gaps between them, px, and a gap as a share."""
    total = panels * height + (panels - 1) * gap
    return total, 0.0 if panels == 1 else gap / total


def place_legend(fig: go.Figure, row: int, top: float) -> None:
    """Place the legend of a stacked panel, rows from 1, above its top, a share of all panels."""
    legend = {"orientation": "h", "x": 0, "y": top + 0.005, "yanchor": "bottom"}
    fig.update_layout({name_legend(row): {**legend, "font": {"size": 11}, "itemwidth": 30}})


def name_legend(row: int) -> str:
    """Return plotly's name of the legend of a stacked panel, rows from 1."""
    return "legend" if row == 1 else f"legend{row}"


def title_lowest_axes(fig: go.Figure, places: Sequence[tuple[int, int]], text: str) -> None:
    """Title the horizontal axis of the lowest panel in each column."""
    for column in {column for _, column in places}:
        row = max(r for r, c in places if c == column)
        fig.update_xaxes(title_text=text, row=row, col=column)


def pick_smallest(values: Sequence[float]) -> list[int]:
    """Return the indices of the `PANELS` smallest values, in ascending order of index."""
    return sorted(np.argsort(values, kind="stable")[:PANELS].tolist())


def note_panels(heads: int) -> str:
    """Return a sentence on which heads have a panel, empty where all have one."""
    return f" The {PANELS} of {heads} heads that act most are shown." if heads > PANELS else ""
