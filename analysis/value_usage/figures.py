"""How values are drawn: use by role, use over training, swaps."""

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.plots import style
from analysis.plots.steps import add_step_axis as step_axis
from analysis.plots.style import COLORS, DASHES, SEQUENTIAL
from analysis.value_usage.choices import Past, Usage
from analysis.value_usage.swaps import Swap

LAYERS = 4
"""Most layers that share a figure."""
LINES = len(COLORS)
"""Most values with a line of their own."""
SPACE = 48
"""Between panels of swaps, where a legend stands, px."""
LABELLED = 12
"""Most values whose share is written into the map."""
HEIGHTS = [0.44, 0.28, 0.28]
"""Of the panels over training, as shares."""
GAP = 0.11
"""Between them."""
LINE = 26
"""Height of a line, px."""


def use(layers: Sequence[Usage], roles: Sequence[str]) -> go.Figure:
    """Draw the share of a role's tokens that choose each value, a map a layer."""
    layers = layers[:LAYERS]
    labels = [*(html.escape(name) for name in roles), "all tokens"]
    panel = LINE * len(labels)
    fig = make_subplots(
        rows=len(layers),
        cols=1,
        subplot_titles=[f"layer {layer.layer}" for layer in layers],
        vertical_spacing=_gap(62, panel, len(layers)),
        figure=style.new_figure(height=style.HEAD + 28 + _tall(62, panel, len(layers)) + 100),
    )
    for i, layer in enumerate(layers):
        shares = np.vstack([layer.by_role, layer.shares])
        few = shares.shape[1] <= LABELLED
        fig.add_heatmap(
            z=shares.astype(np.float32),
            x=list(range(shares.shape[1])),
            y=labels,
            coloraxis="coloraxis",
            texttemplate="%{z:.0%}" if few else None,
            xgap=1,
            ygap=1,
            hoverongaps=False,
            hovertemplate="%{y}, value %{x}: %{z:.2%}<extra></extra>",
            row=i + 1,
            col=1,
        )
        if few:
            fig.update_xaxes(dtick=1, row=i + 1, col=1)
    fig.update_annotations(font_size=11)
    fig.update_xaxes(showgrid=False, ticks="", title_text="value")
    fig.update_yaxes(autorange="reversed", showgrid=False, ticks="", automargin="left")
    return fig.update_layout(
        margin={"t": style.HEAD + 28, "b": 100},
        coloraxis={
            "colorscale": SEQUENTIAL,
            "cmin": 0,
            "cmax": 1,
            "colorbar": {"nticks": 6, "tickformat": ".0%"},
        },
    )


def over_training(past: Past) -> go.Figure:
    """Draw a layer's use, its evenness, and its churn, one below the other, by step."""
    fig = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=GAP,
        row_heights=HEIGHTS,
        figure=style.new_figure(height=600),
    )
    at, steps = np.log2(past.steps + 1.0), [f"{step:,}" for step in past.steps]
    n_values = past.shares.shape[1]
    most = np.sort(np.argsort(-past.shares.max(0), kind="stable")[:LINES])

    def line(name: str, y: np.ndarray, row: int, i: int, ends: np.ndarray | None = None) -> None:
        fig.add_scatter(
            x=at,
            y=y,
            mode="lines+markers",
            line={"color": COLORS[i], "dash": DASHES[i], "width": 1.6},
            marker={"symbol": style.SYMBOLS[i], "size": 6},
            name=name,
            legend="legend" if row == 1 else f"legend{row}",
            text=steps,
            hovertemplate=f"{name}, step %{{text}}: %{{y:.3g}}<extra></extra>",
            error_y=None
            if ends is None
            else {
                "type": "data",
                "symmetric": False,
                "array": np.nan_to_num(ends[:, 1] - y),
                "arrayminus": np.nan_to_num(y - ends[:, 0]),
                "thickness": 1,
                "width": 0,
            },
            cliponaxis=False,
            row=row,
            col=1,
        )

    for i, value in enumerate(most.tolist()):
        line(f"value {value}", past.shares[:, value], 1, i)
    line("values used", past.used.astype(float), 2, 0)
    line("e^H, as many used evenly", past.effective, 2, 1)
    line("changed since", past.churn, 3, 0, past.churn_interval)
    line("tied at the last place", past.ties, 3, 1)
    line("changed if dealt at random", past.churn_dealt, 3, 2)
    step_axis(fig, past.steps)
    fig.update_xaxes(title_text=None, showticklabels=False, row=1, col=1)
    fig.update_xaxes(title_text=None, showticklabels=False, row=2, col=1)
    fig.update_yaxes(title_text="share of tokens", tickformat=".0%", row=1, col=1)
    fig.update_yaxes(title_text="values", range=[0, 1.08 * n_values], row=2, col=1)
    fig.update_yaxes(
        title_text="share of tokens", tickformat=".0%", range=[-0.03, 1.06], row=3, col=1
    )
    high = np.array(HEIGHTS) * (1 - 2 * GAP)
    for row in range(3):
        _legend(fig, row, 1 - high[:row].sum() - GAP * row)
    return fig.update_layout(margin_t=style.HEAD + 48)


def swapped(swaps: Sequence[Swap], roles: Sequence[str]) -> go.Figure:
    """Draw the change of accuracy, a line a group of tokens, a mark a value, a panel a layer."""
    layers = sorted({swap.layer for swap in swaps})[:LAYERS]
    groups = [None, *sorted({swap.role for swap in swaps if swap.role is not None})]
    labels = ["dealt at random", *("all tokens" if g is None else roles[g] for g in groups)]
    panel = LINE * len(labels)
    fig = make_subplots(
        rows=len(layers),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=_gap(SPACE, panel, len(layers)),
        figure=style.new_figure(height=style.HEAD + 56 + _tall(SPACE, panel, len(layers)) + 52),
    )
    tall = _tall(SPACE, panel, len(layers))
    for row, layer in enumerate(layers, start=1):
        mine = [swap for swap in swaps if swap.layer == layer]
        values = list(dict.fromkeys(swap.value for swap in mine))
        forced = sorted(value for value in values if value is not None)
        fig.add_vline(0, line={"color": style.MUTED, "width": 1, "dash": "dot"}, row=row, col=1)  # type: ignore[arg-type]
        for value in values:
            some = [swap for swap in mine if swap.value == value]
            place = 0 if value is None else forced.index(value)
            name = "own, dealt at random" if value is None else f"value {value}"
            color = style.MUTED if value is None else COLORS[place]
            spread = 0.0 if value is None else 0.6 * ((place + 0.5) / len(forced) - 0.5)
            changes = [swap.change for swap in some]
            fig.add_scatter(
                x=[change.value for change in changes],
                y=[0 if value is None else 1 + groups.index(swap.role) + spread for swap in some],
                mode="markers",
                marker={
                    "color": color,
                    "symbol": "cross" if value is None else style.SYMBOLS[place],
                    "size": 8,
                },
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [np.nan_to_num(c.high - c.value) for c in changes],
                    "arrayminus": [np.nan_to_num(c.value - c.low) for c in changes],
                    "thickness": 1.2,
                    "width": 0,
                },
                name=name,
                legend="legend" if row == 1 else f"legend{row}",
                showlegend=value is not None,
                cliponaxis=False,
                hovertemplate=f"layer {layer}, {name}: %{{x:+.2%}}<extra></extra>",
                row=row,
                col=1,
            )
        _legend(fig, row - 1, 1 - (row - 1) * (panel + SPACE) / tall)
        fig.update_yaxes(title_text=f"layer {layer}", row=row, col=1)
    fig.update_yaxes(
        range=[len(labels) - 0.4, -0.6],
        tickvals=list(range(len(labels))),
        ticktext=[html.escape(label) for label in labels],
        ticks="",
        automargin="left",
    )
    fig.update_xaxes(tickformat="+.2~%", nticks=7)
    fig.update_xaxes(title_text="change of accuracy", row=len(layers), col=1)
    return fig.update_layout(margin={"t": style.HEAD + 56, "b": 52})


def _legend(fig: go.Figure, row: int, top: float) -> None:
    """Put a panel's own legend above it."""
    fig.update_layout(
        {
            "legend" if row == 0 else f"legend{row + 1}": {
                "orientation": "h",
                "x": 0,
                "y": top + 0.005,
                "yanchor": "bottom",
                "font": {"size": 11},
                "itemwidth": 30,
            }
        }
    )


def _gap(gap: int, panel: int, panels: int) -> float:
    """Return the gap between panels as a share of all of them and their gaps."""
    return 0.0 if panels == 1 else gap / _tall(gap, panel, panels)


def _tall(gap: int, panel: int, panels: int) -> int:
    """Return how high panels and the gaps between them are together, px."""
    return panel * panels + gap * (panels - 1)
