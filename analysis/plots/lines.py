"""Lines of heads in one panel: a few in colour with a dash each, of many only the extremes."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from analysis.plots import style
from analysis.plots.style import COLORS, DASHES

NAMED = 6
"""Most heads with a colour each."""


def add_heads(
    figure: go.Figure,
    labels: Sequence[str],
    x: Sequence[np.ndarray],
    y: Sequence[np.ndarray],
    extremes: Sequence[int],
    shown: str,
    *,
    legend: bool = True,
    row: int | None = None,
) -> None:
    """Add a line a head.

    Args:
        figure: what they are added to.
        labels: the heads' names.
        x, y: their points.
        extremes: those that are named where there are more than `NAMED` heads.
        shown: plotly's text of a point under the pointer.
        legend: whether the lines have entries in the legend.
        row: of the panel, where there are several.
    """
    named = list(range(len(labels))) if len(labels) <= NAMED else list(dict.fromkeys(extremes))
    for head in sorted(range(len(labels)), key=lambda head: head in named):
        i = named.index(head) if head in named else None
        line: dict[str, object] = {"color": style.MUTED, "width": 1}
        if i is not None:
            line = {"color": COLORS[i], "width": 2.2, "dash": DASHES[i]}
        figure.add_scatter(
            x=x[head],
            y=y[head],
            mode="lines",
            line=line,
            opacity=0.5 if i is None else 1.0,
            name=f"head {labels[head]}",
            legendgroup=labels[head],
            showlegend=legend and i is not None,
            hovertemplate=f"head {labels[head]}, {shown}<extra></extra>",
            row=row,
            col=None if row is None else 1,
        )
