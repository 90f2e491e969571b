"""A figure of accuracy at values of an option: what was trained on is marked."""

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from analysis.plots import style
from analysis.run.reached import Reach

WIDE = 4
"""Values of which the largest is so many times the smallest stand on a logarithmic axis."""
RANGE = "rgba(128, 134, 145, 0.2)"
"""`style.MUTED`, to be seen through."""


def draw(found: Reach) -> go.Figure | None:
    """Draw a dot with its whisker a value, what was trained on marked; None where none was met."""
    if not found.values:
        return None
    fig = style.new_figure(height=360)
    x: Sequence[float] | Sequence[str] = found.places or found.values
    if found.places is not None and found.trained is not None:
        _mark_trained(fig, found.trained)
    fig.add_scatter(
        x=x,
        y=found.chance,
        mode="lines" if len(x) > 1 else "markers",
        line={"color": style.MUTED, "width": 1.4, "dash": "dot"},
        marker={"color": style.MUTED, "symbol": "line-ew-open", "size": 14},
        name="chance",
        hovertemplate="chance: %{y:.2%}<extra></extra>",
    )
    if found.reference is not None:
        along = x if found.trained is None or found.places is None else _ends(found, found.trained)
        fig.add_scatter(
            x=along,
            y=[found.reference] * len(along),
            mode="lines",
            line={"color": style.GREEN, "width": 1.6, "dash": "dash"},
            name="as trained",
            hovertemplate="as trained: %{y:.2%}<extra></extra>",
        )
    fig.add_scatter(
        x=x,
        y=found.accuracy,
        mode="lines+markers" if found.places is not None else "markers",
        line={"width": 2, "color": style.BLUE},
        marker={"size": 8},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": np.maximum(0, found.interval[:, 1] - found.accuracy),
            "arrayminus": np.maximum(0, found.accuracy - found.interval[:, 0]),
            "thickness": 1.5,
            "width": 5,
        },
        cliponaxis=False,
        name="accuracy",
        customdata=[html.escape(value) for value in found.values],
        hovertemplate="%{customdata}: %{y:.2%}<extra></extra>",
    )
    fig.update_yaxes(range=[-0.02, 1.05], tickformat=".0%", title_text="accuracy")
    fig.update_xaxes(title_text=html.escape(found.option), showgrid=False)
    if found.places is None:
        fig.update_xaxes(type="category")
    else:
        fig.update_xaxes(
            type="log" if _logarithmic(found) else "linear",
            tickvals=found.places,
            ticktext=[html.escape(value) for value in found.values],
        )
    return fig.update_layout(margin={"t": 84})


def _mark_trained(fig: go.Figure, trained: tuple[float, float]) -> None:
    """Mark what was trained on: a line, or a range."""
    low, high = trained
    fig.add_scatter(
        x=[low, low, high, high],
        y=[-0.02, 1.05, 1.05, -0.02],
        mode="lines",
        fill="toself",
        fillcolor=RANGE,
        line={"color": style.MUTED, "width": 3 if low == high else 0},
        opacity=0.5,
        name="trained on",
        hoverinfo="skip",
    )


def _ends(found: Reach, trained: tuple[float, float]) -> list[float]:
    assert found.places is not None
    return [min(*found.places, trained[0]), max(*found.places, trained[1])]


def _logarithmic(found: Reach) -> bool:
    assert found.places is not None
    several = [*found.places, *(found.trained or ())]
    return min(several) > 0 and max(several) >= WIDE * min(several)
