"""Vertical axes of figures that have one named line per item, the first on top."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

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
