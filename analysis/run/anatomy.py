"""What is the model made of? A drawing of its stack, read from the bottom up."""

import html
import textwrap
from collections import Counter

import plotly.graph_objects as go

from analysis.base import Subject, Words
from analysis.plots.style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    add_title,
    new_figure,
)
from lab.models.anatomy import Anatomy, Part, dissect

TITLE = "The model"

COLORS = {
    "Attention": BLUE,
    "InnerFunctionAttention": PURPLE,
    "SSD": GREEN,
    "MLP": SKY,
    "CDMoE": ORANGE,
    "PEER": ORANGE,
    "RoutedMoE": VERMILLION,
    "SharedExpertMoE": VERMILLION,
}
"""Edge of a box by the layer's class; the name inside says the same."""

BOX, GAP = 58.0, 18.0
"""Height of a box, and of the space above it, px."""

NOTE = 46
"""Characters of a layer's note in its box: as many as a phone has room for."""

STREAM, LEFT, RIGHT = 0.05, 0.14, 0.84
"""Where the residual stream runs, and the boxes' ends, as shares of the width."""


def measure(subject: Subject) -> list[Anatomy]:
    """Return what the subject's model is made of."""
    return [dissect(subject.model)]


def describe(found: Anatomy) -> Words:
    """Put a model in words."""
    blocks = sum(run.times for run in found.unit) * found.times
    held: Counter[str] = Counter()
    for part in found.parts:
        held[part.name] += part.parameters
    (largest, count), *_ = held.most_common(1)
    says = f"{_counted(blocks, 'block')}, {short(found.total)} parameters"
    if found.active < found.total:
        says += f", {short(found.active)} of them used by a token"
    says += f"; {100 * count / found.total:.0f} % of all are in {_named(largest, found)}."
    return Words(
        title="The stack, from tokens to logits",
        says=says,
        reading=(
            "From the bottom up. Each block adds its mixer's output, then its state transform's, "
            "to the residual stream (the line); × counts alike neighbours, the bracket repeats."
        ),
        alt=f"Drawing of the model's blocks. {says}",
    )


def draw(found: Anatomy) -> go.Figure:
    """Draw a model as boxes along its residual stream, from the bottom up."""
    pitch = BOX + GAP
    layers = [part for run in found.unit for part in (run.pair.mixer, run.pair.transform) if part]
    height = (len(layers) + 2) * pitch - GAP
    fig = new_figure(height=round(height) + 84)
    fig.update_layout(margin={"l": 8, "r": 8, "t": 76, "b": 8}, hovermode=False)
    fig.update_xaxes(visible=False, range=[0, 1], fixedrange=True)
    fig.update_yaxes(visible=False, range=[-1, height + 1], fixedrange=True)
    _line(fig, [(STREAM, BOX), (STREAM, height - BOX)])
    _box(fig, 0.005, 0.0, found.embedding)
    for i, part in enumerate(layers, start=1):
        low, high = i * pitch + 0.2 * BOX, i * pitch + 0.8 * BOX
        _line(fig, [(STREAM, low), (LEFT, low)])
        _line(fig, [(LEFT, high), (STREAM, high)])
        _box(fig, LEFT, i * pitch, part)
    _box(fig, 0.005, height - BOX, found.head)
    sums = [i * pitch + 0.8 * BOX for i in range(1, len(layers) + 1)]
    fig.add_scatter(
        x=[STREAM] * len(sums),
        y=sums,
        mode="markers",
        marker={"symbol": "circle-cross-open", "size": 13, "color": MUTED, "line": {"width": 2}},
        showlegend=False,
    )
    first = 1
    for run in found.unit:
        last = first + (run.pair.mixer is not None) + (run.pair.transform is not None)
        if run.times > 1:
            _bracket(fig, RIGHT + 0.03, first * pitch, last * pitch - GAP, run.times)
        first = last
    if found.times > 1:
        _bracket(fig, RIGHT + 0.1, pitch, height - pitch, found.times)
    return fig


def page(found: Anatomy, name: str) -> str:
    """Return the drawing as a page of its own, with what it says."""
    lines = map(html.escape, textwrap.wrap(describe(found).says, width=80))
    fig = add_title(draw(found), name, "")
    return fig.update_layout(title_subtitle_text="<br>".join(lines)).to_html(include_plotlyjs=True)


def short(count: int) -> str:
    """Return a count of parameters as text: 812, 41.5 k, 7.08 M, 1.30 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _box(fig: go.Figure, left: float, low: float, part: Part) -> None:
    color = COLORS.get(part.name, MUTED)
    frame = {"type": "rect", "x0": left, "x1": RIGHT, "y0": low, "y1": low + BOX}
    fig.add_shape(frame, fillcolor=color, opacity=0.14, line={"width": 0})
    fig.add_shape(frame, line={"color": color, "width": 2})
    held = f"{short(part.parameters)} parameters"
    if part.active < part.parameters:
        held += f", {short(part.active)} active"
    note = textwrap.wrap(part.note, width=NOTE, max_lines=1, placeholder=" …")
    lines = [f"<b>{html.escape(part.name)}</b>", *map(html.escape, note), held]
    _label(fig, (LEFT + RIGHT) / 2, low + BOX / 2, "<br>".join(lines))


def _bracket(fig: go.Figure, at: float, low: float, high: float, times: int) -> None:
    _line(fig, [(at - 0.012, low), (at, low), (at, high), (at - 0.012, high)])
    _label(fig, at + 0.028, (low + high) / 2, f"× {times}")


def _line(fig: go.Figure, points: list[tuple[float, float]]) -> None:
    path = "M " + " L ".join(f"{x},{y}" for x, y in points)
    fig.add_shape(type="path", path=path, line={"color": MUTED, "width": 2}, layer="below")


def _label(fig: go.Figure, x: float, y: float, text: str) -> None:
    fig.add_annotation(x=x, y=y, text=text, xanchor="center", yanchor="middle")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _named(name: str, found: Anatomy) -> str:
    count = sum(part.name == name for part in found.parts)
    return f"the {name}" if count == 1 else f"the {count} {name} layers"
