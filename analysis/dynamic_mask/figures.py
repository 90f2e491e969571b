"""How masks are drawn: panels of positions or roles, maps and curves over training."""

import html
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.plots import style
from analysis.plots.style import COLORS, DASHES, SEQUENTIAL
from analysis.statistics.estimates import thin

PANELS = 8
"""Most heads with a panel of their own."""
HEAD = style.HEAD + 26
"""Height of what is above the panels, but for a legend, px."""


def positions(
    names: Sequence[str],
    roles: Sequence[str],
    bias: Float[np.ndarray, "n roles bins"],
    spread: Float[np.ndarray, "n roles bins"],
    width: int,
) -> go.Figure:
    """Draw each head's mean bias by position, a mark a role; whiskers are standard deviations."""
    fig, places = _panels(names, 190)
    at = (np.arange(bias.shape[2]) + 0.5) * width - 0.5
    for i, (row, column) in enumerate(places):
        for role, name in enumerate(roles):
            there = np.isfinite(bias[i, role])
            whiskers = spread[i, role, there]
            fig.add_scatter(
                x=at[there],
                y=bias[i, role, there],
                mode="markers",
                marker={"color": _color(role), "symbol": _symbol(role), "size": 6},
                error_y={"array": whiskers, "thickness": 0.8, "width": 0}
                if (whiskers > 0).any()
                else None,
                name=html.escape(name),
                legendgroup=name,
                showlegend=i == 0,
                hovertemplate=f"{html.escape(name)} at %{{x:.0f}}: %{{y:.3g}}<extra></extra>",
                row=row,
                col=column,
            )
    fig.update_yaxes(title_text="bias, nats", col=1)
    _title_below(fig, places, "position of the key, tokens")
    return fig


def bars(
    names: Sequence[str],
    roles: Sequence[str],
    kept: Float[np.ndarray, "n roles"],
    weights: Float[np.ndarray, "n roles"],
    overall: Sequence[float],
) -> go.Figure:
    """Draw each head's kept share and mean weight by role, over the share that it keeps of all."""
    fig, places = _panels(names, 180)
    labels = [html.escape(name) for name in roles]
    for i, (row, column) in enumerate(places):
        fig.add_bar(
            x=labels,
            y=kept[i],
            marker={"color": [_color(role) for role in range(len(roles))]},
            text=["" if math.isnan(share) else f"{100 * share:.0f} %" for share in kept[i]],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{x}: %{y:.1%}<extra></extra>",
            showlegend=False,
            row=row,
            col=column,
        )
        fig.add_scatter(
            x=labels,
            y=weights[i],
            mode="markers",
            marker={
                "symbol": "diamond",
                "size": 9,
                "color": style.YELLOW,
                "line": {"width": 1, "color": style.MUTED},
            },
            name="mean weight",
            legendgroup="weight",
            showlegend=i == 0,
            hovertemplate="%{x}, mean weight: %{y:.3g}<extra></extra>",
            row=row,
            col=column,
        )
        fig.add_scatter(
            x=labels,
            y=[overall[i]] * len(labels),
            mode="lines",
            line={"color": style.MUTED, "width": 1.5, "dash": "dash"},
            name="kept of all keys, as if blind to roles",
            legendgroup="overall",
            showlegend=i == 0,
            hovertemplate="of all keys: %{y:.1%}<extra></extra>",
            row=row,
            col=column,
        )
    fig.update_yaxes(range=[0, 1.2], tickvals=[0, 0.5, 1], tickformat=".0%")
    fig.update_yaxes(title_text="share kept", col=1)
    fig.update_xaxes(showgrid=False, tickangle=0)
    return fig.update_layout(bargap=0.35)


def places(
    names: Sequence[str],
    roles: Sequence[str],
    bands: Sequence[int],
    kept: Float[np.ndarray, "n roles bands"],
) -> go.Figure:
    """Draw each head's kept share by role and band of positions; bands begin at those given."""
    high = 34 * len(roles) + 40
    fig, panels = _panels(names, high, legend=False)
    labels = [html.escape(name) for name in roles]
    spans = [
        f"{first}–{after - 1}" if after - 1 > first else f"{first}"
        for first, after in pairwise(bands)
    ]
    for i, (row, column) in enumerate(panels):
        fig.add_heatmap(
            z=kept[i].astype(np.float32),
            x=list(range(len(spans))),
            y=labels,
            customdata=[spans] * len(labels),
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            hoverongaps=False,
            hovertemplate="%{y} at %{customdata}: %{z:.1%} kept<extra></extra>",
            row=row,
            col=column,
        )
    fig.update_xaxes(showgrid=False, ticks="", tickangle=-45)
    fig.update_xaxes(tickvals=list(range(len(spans))), ticktext=spans)
    fig.update_yaxes(showgrid=False, ticks="", autorange="reversed")
    fig.update_yaxes(automargin="left", col=1)
    fig.update_yaxes(showticklabels=False, col=2)
    _title_below(fig, panels, "position of the key, tokens")
    return fig.update_layout(
        coloraxis={
            "colorscale": SEQUENTIAL,
            "cmin": 0,
            "cmax": 1,
            "colorbar": {"nticks": 6, "tickformat": ".0%"},
        },
        margin={"b": 122},
        height=_height(len(names), high, legend=False) + 70,
    )


def dumbbells(
    names: Sequence[str],
    without: Float[np.ndarray, " n"],
    masked: Float[np.ndarray, " n"],
    ends: Float[np.ndarray, "n 2"],
    notes: Sequence[str],
) -> go.Figure:
    """Draw the attention on the answer's value without the mask and with it, a line a head.

    The whiskers of the latter go to the ends of its interval; NaN for none.
    """
    lines = list(range(len(names)))
    fig = style.new_figure(height=150 + 34 * len(names))
    for line in lines:
        fig.add_scatter(
            x=[without[line], masked[line]],
            y=[line, line],
            mode="lines",
            line={"color": style.MUTED, "width": 2},
            showlegend=False,
            hoverinfo="skip",
        )
        right = max(without[line], masked[line]) < 0.5
        fig.add_annotation(
            text=html.escape(notes[line]),
            x=max(without[line], masked[line]) if right else min(without[line], masked[line]),
            y=line,
            xanchor="left" if right else "right",
            xshift=10 if right else -10,
        )
    for series, values, symbol, color in (
        ("without the mask, A⁰", without, "circle-open", style.VERMILLION),
        ("with it, A", masked, "circle", style.BLUE),
    ):
        fig.add_scatter(
            x=values,
            y=lines,
            mode="markers",
            marker={"symbol": symbol, "color": color, "size": 9, "line": {"width": 2}},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": np.nan_to_num(ends[:, 1] - masked),
                "arrayminus": np.nan_to_num(masked - ends[:, 0]),
                "thickness": 1.2,
                "width": 3,
            }
            if symbol == "circle"
            else None,
            name=series,
            cliponaxis=False,
            hovertemplate=f"{series}: %{{x:.2%}}<extra></extra>",
        )
    fig.update_xaxes(range=[-0.03, 1.03], tickformat=".0%")
    fig.update_xaxes(title_text="attention of scored queries on their answer's value")
    fig.update_yaxes(
        range=[len(names) - 0.4, -0.6],
        tickvals=lines,
        ticktext=list(names),
        showgrid=False,
        ticks="",
        automargin="left",
    )
    return fig.update_layout(margin_t=80)


def maps(
    names: Sequence[str],
    steps: Int[np.ndarray, " steps"],
    values: Float[np.ndarray, "steps n bins"],
    width: int,
    quantity: str,
) -> go.Figure:
    """Draw each head's values by step, upwards, and position."""
    fig, places = _panels(names, 220, legend=False)
    labels = [f"{step:,}" for step in steps]
    shown = thin(range(len(steps)), 8)
    for i, (row, column) in enumerate(places):
        fig.add_heatmap(
            z=values[:, i].astype(np.float32),
            x0=(width - 1) / 2,
            dx=width,
            y=list(range(len(steps))),
            text=np.broadcast_to(np.array(labels)[:, None], values[:, i].shape).tolist()
            if values[:, i].size < 20_000
            else None,
            coloraxis="coloraxis",
            hovertemplate=f"step %{{text}}, position %{{x:.0f}}: {quantity} = %{{z:.3g}}"
            "<extra></extra>",
            row=row,
            col=column,
        )
    fig.update_xaxes(showgrid=False)
    fig.update_yaxes(showgrid=False, tickvals=shown, ticktext=[labels[i] for i in shown])
    fig.update_yaxes(title_text="training step", title_standoff=2, col=1)
    _title_below(fig, places, "position of the key, tokens")
    return fig.update_layout(
        coloraxis={
            "colorscale": SEQUENTIAL,
            "colorbar": {"nticks": 6},
        },
        margin={"b": 104, "l": 70},
        height=_height(len(names), 220, legend=False) + 52,
    )


def curves(
    names: Sequence[str],
    steps: Int[np.ndarray, " steps"],
    upper: Float[np.ndarray, "steps n"],
    lower: Float[np.ndarray, "steps n"],
    titles: tuple[str, str],
) -> go.Figure:
    """Draw two quantities by step, one below the other, a line a layer."""
    empty = style.new_figure(height=440)
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09, figure=empty)
    at = np.log2(steps + 1.0)
    for row, values in ((1, upper), (2, lower)):
        for i, name in enumerate(names):
            own = i < len(COLORS)
            fig.add_scatter(
                x=at,
                y=values[:, i],
                mode="lines+markers",
                line={"color": _color(i) if own else style.MUTED, "dash": DASHES[i % len(DASHES)]},
                marker={"symbol": _symbol(i), "size": 6},
                name=name,
                legendgroup=name,
                showlegend=row == 1 and own,
                text=[f"{step:,}" for step in steps],
                hovertemplate=f"{name}, step %{{text}}: %{{y:.3g}}<extra></extra>",
                row=row,
                col=1,
            )
        fig.update_yaxes(
            title_text=titles[row - 1], rangemode="tozero", exponentformat="power", row=row, col=1
        )
    step_axis(fig, steps)
    fig.update_xaxes(title_text=None, showticklabels=False, row=1, col=1)
    return fig.update_layout(margin_t=84)


def step_axis(fig: go.Figure, steps: Int[np.ndarray, " steps"]) -> None:
    """Label horizontal axes of log₂(step + 1) with steps: 0 has a place, and early ones room."""
    last = int(steps[-1])
    ticks = sorted({0, 1, *(4**k for k in range(1, 16) if 3 * 4**k <= 2 * last), last})
    fig.update_xaxes(
        title_text="training step",
        tickvals=np.log2(np.array(ticks) + 1.0),
        ticktext=[f"{tick:,}" for tick in ticks],
        range=[-0.15, math.log2(last + 1) + 0.15],
    )


def _panels(
    names: Sequence[str], height: int, *, legend: bool = True
) -> tuple[go.Figure, list[tuple[int, int]]]:
    """Return a figure with a titled panel for each name, two abreast, and where they are."""
    across = min(2, len(names))
    down = math.ceil(len(names) / across)
    fig = make_subplots(
        rows=down,
        cols=across,
        subplot_titles=list(names),
        horizontal_spacing=0.1,
        vertical_spacing=0.0 if down == 1 else 56 / (height * down),
        figure=style.new_figure(height=_height(len(names), height, legend=legend)),
    )
    fig.update_annotations(font_size=11)
    fig.update_layout(
        margin={"t": HEAD + 36 * legend, "b": 52},
        legend={"y": 1 + 20 / (height * down), "yref": "paper", "yanchor": "bottom"},
    )
    return fig, [(i // across + 1, i % across + 1) for i in range(len(names))]


def _height(panels: int, height: int, *, legend: bool) -> int:
    """Return how high a figure of such panels is, px."""
    return HEAD + 36 * legend + height * math.ceil(panels / min(2, panels)) + 52


def _title_below(fig: go.Figure, places: Sequence[tuple[int, int]], text: str) -> None:
    """Name the horizontal axis of the lowest panel of each column."""
    for column in {column for _, column in places}:
        row = max(r for r, c in places if c == column)
        fig.update_xaxes(title_text=text, row=row, col=column)


def _color(i: int) -> str:
    return COLORS[i % len(COLORS)]


def _symbol(i: int) -> str:
    return style.SYMBOLS[i % len(style.SYMBOLS)]
