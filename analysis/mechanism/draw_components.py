"""A figure of which component carries the answer: a line a component, a column a site."""

import numpy as np
import plotly.graph_objects as go

from analysis.mechanism.components import Components
from analysis.plots import style

ROW = 26
"""Height of a line, px."""
COLUMNS = ("keys", "values", "queries", "placebo")


def components(found: Components) -> go.Figure:
    """Draw the restored shares as colours, and as numbers."""
    names = [
        f"{layer} · {kind}" for layer, kind in zip(found.layers, found.components, strict=True)
    ]
    fig = style.new_figure(height=64 + ROW * max(3, len(names)) + 92)
    fig.add_heatmap(
        x=COLUMNS,
        y0=0,
        dy=1,
        z=found.share.astype(np.float32),
        text=_numbers(found),
        texttemplate="%{text}",
        customdata=[[name] * len(COLUMNS) for name in names],
        coloraxis="coloraxis",
        xgap=2,
        ygap=2,
        hovertemplate="layer %{customdata} at the %{x}: %{text}<extra></extra>",
    )
    fig.update_layout(
        coloraxis={
            "cmin": -1,
            "cmax": 1,
            "colorbar": {
                "tickvals": [-1, -0.5, 0, 0.5, 1],
            },
        },
    )
    fig.add_annotation(
        text="answer restored, share of the margin",
        x=0.5,
        xref="paper",
        y=0,
        yref="paper",
        yshift=-26,
    )
    fig.update_xaxes(side="top", showgrid=False, ticks="")
    fig.update_yaxes(
        range=[len(names) - 0.5, -0.5],
        tickvals=list(range(len(names))),
        ticktext=names,
        showgrid=False,
        ticks="",
        title_text="layer",
        automargin="left",
    )
    return fig.update_layout(margin={"t": 72, "b": 84})


def _numbers(found: Components) -> list[list[str]]:
    """Return the shares in two digits, in bold where the interval is off 0."""
    low, high = found.interval[..., 0], found.interval[..., 1]
    sure = (low > 0) | (high < 0)
    return [
        [
            f"<b>{value:.2f}</b>" if bold else f"{value:.2f}"
            for value, bold in zip(*row, strict=True)
        ]
        for row in zip(found.share.round(2) + 0.0, sure, strict=True)
    ]
