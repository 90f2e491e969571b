"""Draw accuracy by bins of a whole number: a line with its 95 % band, and chance."""

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from analysis.plots import style
from analysis.statistics.comparisons import Bins, format_span

BAND = "rgba(128, 134, 145, 0.28)"
"""`style.MUTED`, translucent."""


def add_bins(
    fig: go.Figure,
    binned: Bins,
    middle: Float[np.ndarray, " n"],
    chance: float,
    name: str,
    *,
    row: int,
) -> None:
    """Add accuracy with its 95 % band to a panel, and a dotted line at chance.

    Args:
        fig: what they are added to.
        binned: the bins.
        middle: the place of each bin on the axis.
        chance: accuracy of a uniform guess.
        name: of the line in the legend.
        row: of the panel; the first row has the legend entries of band and chance.
    """
    spans = [format_span(binned, i) for i in range(len(binned.first))]
    panel = {"row": row, "col": 1}
    fig.add_scatter(
        x=np.concatenate([middle, middle[::-1]]),
        y=np.concatenate([binned.interval[:, 1], binned.interval[::-1, 0]]),
        fill="toself",
        fillcolor=BAND,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        name="95 %",
        showlegend=row == 1,
        **panel,
    )
    fig.add_scatter(
        x=middle,
        y=binned.accuracy,
        mode="lines+markers",
        line={"width": 2},
        marker={"size": 7, "symbol": style.SYMBOLS[row - 1]},
        name=name,
        cliponaxis=False,
        customdata=np.stack([spans, binned.count.astype(str)], 1),
        hovertemplate="%{customdata[0]}: %{y:.2%} of %{customdata[1]} answers<extra></extra>",
        **panel,
    )
    fig.add_scatter(
        x=middle[[0, -1]],
        y=[chance, chance],
        mode="lines",
        line={"color": style.MUTED, "width": 1.2, "dash": "dot"},
        name="chance",
        showlegend=row == 1,
        hovertemplate="chance: %{y:.2%}<extra></extra>",
        **panel,
    )
