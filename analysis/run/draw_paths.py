"""How training is drawn: panels over one axis of steps, and the order in which things change."""

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Int, Real
from plotly.subplots import make_subplots

from analysis.plots import style
from analysis.plots.style import BLUE, GREEN, HEAD, MUTED, ORANGE, PURPLE, SKY, VERMILLION
from analysis.run.paths import Onset, Onsets, Path, Paths, changes, in_order
from analysis.run.trajectories import LOSS
from analysis.statistics.change_points import Change

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
"""Of the runs, in turn."""
FIRST = 0.5
"""Where step 0 stands on a logarithmic axis."""
PANEL, GAP, TOP, BOTTOM = 76, 30, HEAD + 24, 50
"""Heights of a quantity's panel, of what is between two, above the first and below the last, px."""
LEAST_LOSS = 1e-4
"""Nats at which the loss axis, logarithmic, ends."""


def draw_paths(result: Paths) -> go.Figure:
    """Draw a panel a quantity over one axis of steps."""
    count = len(result.paths)
    inside = count * PANEL + (count - 1) * GAP
    fig = make_subplots(
        rows=count,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=GAP / inside,
        figure=style.new_figure(height=TOP + inside + BOTTOM),
    )
    x = steps_shown(result.steps)
    for row, path in enumerate(result.paths, 1):
        for i, series in enumerate(path.series):
            leads = i == path.leading
            where = "" if series.layer is None else f"layer {series.layer}, "
            value = {"share": ".1%", "nats": ".3~g", "number": ".1f"}[series.unit]
            fig.add_scatter(
                x=x,
                y=series.values.astype(np.float32),
                customdata=result.steps,
                mode="lines",
                line={"color": BLUE if leads else MUTED, "width": 2.2 if leads else 1.2},
                hovertemplate=f"{where}step %{{customdata:,}}: %{{y:{value}}}<extra></extra>",
                row=row,
                col=1,
            )
        _mark(fig, path, result.steps, row)
        _scale(fig, path, row)
    fig.update_xaxes(**step_axis(int(result.steps[-1])))
    fig.update_xaxes(title_text="training step", row=count, col=1)
    return fig.update_layout(showlegend=False, margin={"l": 50, "t": TOP, "b": BOTTOM})


def draw_onsets(onsets: Onsets) -> go.Figure:
    """Draw a row a quantity, earliest on top, and in it a dot and two bars a run."""
    names, runs = in_order(onsets.onsets), len(onsets.runs)
    pitch = max(34, 13 * runs + 12)
    top = HEAD + 20 * (1 + math.ceil(runs / 3))
    fig = style.new_figure(height=top + pitch * max(1, len(names)) + BOTTOM)
    for i, (run, row) in enumerate(zip(onsets.runs, onsets.onsets, strict=True)):
        found = {onset.quantity: onset for onset in row if onset.change}
        [when] = changes([row])
        lower = (i - (runs - 1) / 2) * 13 / pitch
        heights = {name: k + lower for k, name in enumerate(names) if name in found}
        color = COLORS[i % len(COLORS)]
        bars: dict[str, list[float | None]] = {"rise": [], "bracket": []}
        for name in heights:
            change = when[name]
            ends = onsets.last_step if change.ends is None else change.ends
            bars["rise"] += [*steps_shown(np.array([change.begins, ends])), None]
            bars["bracket"] += [*steps_shown(np.array([change.low, change.high])), None]
        for name, width, opacity in (("rise", 1.4, 0.8), ("bracket", 13, 0.4)):
            fig.add_scatter(
                x=bars[name],
                y=[y for height in heights.values() for y in (height, height, None)],
                mode="lines",
                line={"width": width, "color": color},
                opacity=opacity,
                showlegend=False,
                hoverinfo="skip",
            )
        fig.add_scatter(
            x=steps_shown(np.array([when[name].step for name in heights], dtype=np.float64)),
            y=list(heights.values()),
            mode="markers",
            name=html.escape(run),
            marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 6, "color": color},
            customdata=[_hover(run, found[name]) for name in heights],
            hovertemplate="%{customdata}<extra></extra>",
        )
    begin = min((c.begins for run in changes(onsets.onsets) for c in run.values()), default=0)
    fig.update_xaxes(**step_axis(onsets.last_step, begin / 1.2), title_text="training step")
    fig.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=[_label(name, onsets.onsets) for name in names],
        range=[max(1, len(names)) - 0.4, -0.6],
        ticks="",
        showline=False,
        automargin="left",
    )
    return fig.update_layout(showlegend=runs > 1, margin={"t": top, "b": BOTTOM})


def bracket(change: Change) -> str:
    """Return between which steps a change lies."""
    return f"steps {change.low:,} to {change.high:,}"


def steps_shown(steps: Real[np.ndarray, " n"]) -> list[float]:
    """Return where steps stand on a logarithmic axis that has room for step 0."""
    return np.maximum(steps, FIRST).tolist()


def step_axis(last: int, first: float = 0.0) -> dict[str, Any]:
    """Return the settings of a logarithmic axis of training steps."""
    low, high = math.log10(max(first, FIRST)), math.log10(max(last, 1))
    # Decades alone where there are several; else their halves and fifths, too.
    parts = (1,) if high - low > 2 else (1, 2, 5)
    ticks = [part * 10**k for k in range(math.floor(high) + 1) for part in parts]
    return {
        "type": "log",
        "range": [low - 0.02 * (high - low) - 0.02, high + 0.02 * (high - low) + 0.02],
        "tickvals": [FIRST, *ticks],
        "ticktext": ["0", *(f"{tick:,}" for tick in ticks)],
    }


def _mark(fig: go.Figure, path: Path, steps: Int[np.ndarray, " n"], row: int) -> None:
    """Mark the leading layer's change by a band and a diamond, and name the panel."""
    series, change = path.lead, path.change
    k = "" if row == 1 else str(row)
    text = f"<b>{series.quantity}</b>, {series.axis}"
    if series.layer is not None:
        text += f" · layer {series.layer}"
    if series.head is not None:
        text += f" head {series.head}"
    still = "moves, at no one time" if path.moved else "no change"
    text += f" · {bracket(change) if change else still}"
    fig.add_annotation(
        text=text,
        x=0,
        xref=f"x{k} domain",
        xanchor="left",
        y=1,
        yref=f"y{k} domain",
        yanchor="bottom",
    )
    if series.null is not None:
        fig.add_shape(
            type="line",
            x0=0,
            x1=1,
            xref=f"x{k} domain",
            y0=series.null,
            y1=series.null,
            yref=f"y{k}",
            line={"color": MUTED, "width": 1.2, "dash": "dot"},
            layer="below",
        )
    if change is None:
        return
    low, high = steps_shown(np.array([change.low, change.high]))
    fig.add_shape(
        type="rect",
        x0=low,
        x1=high,
        xref=f"x{k}",
        y0=0,
        y1=1,
        yref=f"y{k} domain",
        fillcolor=VERMILLION,
        opacity=0.25,
        line_width=0,
        layer="below",
    )
    height = np.interp(np.log2(1 + change.step), np.log2(1.0 + steps), series.values)
    fig.add_scatter(
        x=steps_shown(np.array([change.step])),
        y=[height],
        mode="markers",
        marker={"symbol": "diamond", "size": 9, "color": VERMILLION},
        hovertemplate=f"changes in {bracket(change)}<extra></extra>",
        row=row,
        col=1,
    )


def _scale(fig: go.Figure, path: Path, row: int) -> None:
    """Scale a panel's axis: shares from 0 to 1, a loss over decades, the rest from 0."""
    values = np.concatenate([series.values for series in path.series])
    unit, name = path.lead.unit, path.lead.quantity
    if unit == "share":
        settings = {"range": [-0.05, 1.05], "tickvals": [0, 0.5, 1], "tickformat": ".0%"}
    elif name == LOSS.name:
        low, high = np.log10(np.maximum([values.min(), values.max()], LEAST_LOSS))
        settings = {"type": "log", "range": [low - 0.2, high + 0.2], "tickformat": "~g"}
        settings["dtick"] = max(1, math.ceil((high - low) / 3))
    else:
        settings = {"range": [-0.05 * values.max(), 1.1 * values.max() or 1.0], "nticks": 4}
    fig.update_yaxes(**settings, row=row, col=1)


def _label(name: str, runs: Sequence[Sequence[Onset]]) -> str:
    """Name a quantity with its layer, where all runs have the same."""
    layers = {
        onset.layer for run in runs for onset in run if onset.quantity == name and onset.change
    }
    [layer] = layers if len(layers) == 1 else [None]
    return name if layer is None else f"{name}, layer {layer}"


def _hover(run: str, onset: Onset) -> str:
    assert onset.change is not None
    where = "" if onset.layer is None else f", layer {onset.layer}"
    text = f"{onset.quantity}{where}: {bracket(onset.change)}"
    return f"{html.escape(run)}<br>{text}" if run else text
