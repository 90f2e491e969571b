"""Cost by size, a panel for each size: what `lab bench --only scaling` measured, and the bounds."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.plots.style import BLUE, MUTED, VERMILLION, new_figure
from lab.bench.scaling import CostCurve

COLUMNS, PANEL = 2, 190


def draw(curves: Sequence[CostCurve]) -> go.Figure:
    """Draw CPU time and memory against each size, both axes logarithmic.

    A dotted line through the last point has the slope of the bound: times should rise no faster.
    """
    rows = -(-len(curves) // COLUMNS)
    fig = make_subplots(
        rows=rows,
        cols=COLUMNS,
        subplot_titles=[
            f"{curve.stack}: {curve.axis}, exponent {curve.ours:.2f}" for curve in curves
        ],
        horizontal_spacing=0.12,
        vertical_spacing=0.34 / rows,
        figure=new_figure(height=PANEL * rows + 90),
    )
    for i, curve in enumerate(curves):
        place = {"row": i // COLUMNS + 1, "col": i % COLUMNS + 1, "showlegend": i == 0}
        last, sizes = curve.milliseconds[-1], curve.sizes
        for name, costs, color, symbol, dash in (
            ("CPU ms", curve.milliseconds, BLUE, "circle", "solid"),
            ("MiB of tensors", curve.mebibytes, VERMILLION, "square", "dash"),
        ):
            fig.add_scatter(
                x=sizes,
                y=costs,
                mode="lines+markers",
                line={"color": color, "width": 2, "dash": dash},
                marker={"symbol": symbol, "size": 7},
                name=name,
                legendgroup=name,
                hovertemplate=f"{curve.axis} %{{x:,}}: %{{y:.3g}} {name}<extra></extra>",
                **place,
            )
        fig.add_scatter(
            x=[sizes[0], sizes[-1]],
            y=[last * (sizes[0] / sizes[-1]) ** curve.theirs, last],
            mode="lines",
            line={"color": MUTED, "width": 1.5, "dash": "dot"},
            name="time at the bound",
            legendgroup="bound",
            hoverinfo="skip",
            **place,
        )
        fig.update_xaxes(
            type="log",
            tickvals=sizes,
            ticktext=[f"{size:,}" for size in sizes],
            row=place["row"],
            col=place["col"],
        )
    fig.update_yaxes(type="log", dtick="D2")
    fig.update_annotations(font_size=11)
    return fig.update_layout(legend={"y": -40 / (PANEL * rows), "yanchor": "top"}, margin_b=70)
