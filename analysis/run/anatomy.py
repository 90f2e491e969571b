"""What is the model made of? A drawing of its stack, read from the bottom up."""

import html
import textwrap
from collections import Counter
from dataclasses import dataclass

import plotly.graph_objects as go

from analysis.base import Finding, Subject
from analysis.figures.theme import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    new_figure,
)
from lab.models.anatomy import Anatomy, Part, dissect

__all__ = ["TITLE", "StackAnatomy", "measure"]

TITLE = "The model"

EDGES = {
    "Attention": BLUE,
    "InnerFunctionAttention": PURPLE,
    "SSD": GREEN,
    "MLP": SKY,
    "CDMoE": ORANGE,
    "PEER": ORANGE,
    "RoutedMoE": VERMILLION,
    "SharedExpertMoE": VERMILLION,
}
"""Colour of a box's edge by the class of the layer; the box also names the class."""

BOX, GAP = 58.0, 18.0
"""Heights of a box and of the space above it, px."""

NOTE = 46
"""Maximum number of characters of the note in a box: as many as fit on a phone."""

STREAM, LEFT, RIGHT = 0.05, 0.14, 0.84
"""Horizontal places of the residual stream and of both ends of a box, as shares of the width."""


@dataclass(frozen=True)
class StackAnatomy(Anatomy, Finding):
    """What a model is made of, in words and as a drawing."""

    @classmethod
    def of(cls, found: Anatomy) -> "StackAnatomy":
        """Return an anatomy as a finding."""
        return cls(found.embedding, found.unit, found.times, found.head, found.state)

    title = "The stack, from tokens to logits"
    reading = (
        "Read it from the bottom up. Each block adds the output of its mixer, then that of its "
        "state transform, to the residual stream (the line). A bracket marks blocks that repeat, "
        "and × says how often."
    )

    @property
    def says(self) -> str:
        """How large the model is, where most of it is, and what decoding keeps of a row."""
        blocks = sum(run.times for run in self.unit) * self.times
        sizes: Counter[str] = Counter()
        for part in self.parts:
            sizes[part.name] += part.parameters
        [(largest, size)] = sizes.most_common(1)
        count = f"{abbreviate(self.total)} parameters, of which a token uses "
        said = (
            f"Blocks: {blocks}; {count}{abbreviate(self.active)}; {100 * size / self.total:.0f} % "
            f"of all are in {largest}."
        )
        return said if self.state is None else f"{said} State of a row in decoding: {self.state}."

    def figure(self) -> go.Figure:
        """Draw the layers as boxes along the residual stream, from the bottom up."""
        pitch = BOX + GAP
        layers = [
            part for run in self.unit for part in (run.pair.mixer, run.pair.transform) if part
        ]
        height = (len(layers) + 2) * pitch - GAP
        fig = new_figure(height=round(height) + 84)
        fig.update_layout(margin={"l": 8, "r": 8, "t": 76, "b": 8}, hovermode=False)
        fig.update_xaxes(visible=False, range=[0, 1], fixedrange=True)
        fig.update_yaxes(visible=False, range=[-1, height + 1], fixedrange=True)
        _add_line(fig, [(STREAM, BOX), (STREAM, height - BOX)])
        _add_box(fig, 0.005, 0.0, self.embedding)
        for i, part in enumerate(layers, start=1):
            low, high = i * pitch + 0.2 * BOX, i * pitch + 0.8 * BOX
            _add_line(fig, [(STREAM, low), (LEFT, low)])
            _add_line(fig, [(LEFT, high), (STREAM, high)])
            _add_box(fig, LEFT, i * pitch, part)
        _add_box(fig, 0.005, height - BOX, self.head)
        sums = [i * pitch + 0.8 * BOX for i in range(1, len(layers) + 1)]
        fig.add_scatter(
            x=[STREAM] * len(sums),
            y=sums,
            mode="markers",
            marker={
                "symbol": "circle-cross-open",
                "size": 13,
                "color": MUTED,
                "line": {"width": 2},
            },
            showlegend=False,
        )
        first = 1
        for run in self.unit:
            last = first + (run.pair.mixer is not None) + (run.pair.transform is not None)
            if run.times > 1:
                _add_bracket(fig, RIGHT + 0.03, first * pitch, last * pitch - GAP, run.times)
            first = last
        if self.times > 1:
            _add_bracket(fig, RIGHT + 0.1, pitch, height - pitch, self.times)
        return fig


def measure(subject: Subject) -> list[StackAnatomy]:
    """Take the subject's model apart."""
    return [StackAnatomy.of(dissect(subject.model, subject.task.seq_len))]


def abbreviate(count: int) -> str:
    """Return a count of parameters or bytes as text: 812, 41.5 k, 7.08 M, 1.30 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _add_box(fig: go.Figure, left: float, low: float, part: Part) -> None:
    color = EDGES.get(part.name, MUTED)
    frame = {"type": "rect", "x0": left, "x1": RIGHT, "y0": low, "y1": low + BOX}
    fig.add_shape(frame, fillcolor=color, opacity=0.14, line={"width": 0})
    fig.add_shape(frame, line={"color": color, "width": 2})
    held = f"{abbreviate(part.parameters)} parameters"
    if part.active < part.parameters:
        held += f", {abbreviate(part.active)} active"
    if part.state is not None and part.state.bytes is not None:
        held += f", {abbreviate(part.state.bytes)} bytes of state"
    note = textwrap.wrap(part.note, width=NOTE, max_lines=1, placeholder=" …")
    lines = [f"<b>{html.escape(part.name)}</b>", *map(html.escape, note), held]
    _add_label(fig, (LEFT + RIGHT) / 2, low + BOX / 2, "<br>".join(lines))


def _add_bracket(fig: go.Figure, at: float, low: float, high: float, times: int) -> None:
    _add_line(fig, [(at - 0.012, low), (at, low), (at, high), (at - 0.012, high)])
    _add_label(fig, at + 0.028, (low + high) / 2, f"× {times}")


def _add_line(fig: go.Figure, points: list[tuple[float, float]]) -> None:
    path = "M " + " L ".join(f"{x},{y}" for x, y in points)
    fig.add_shape(type="path", path=path, line={"color": MUTED, "width": 2}, layer="below")


def _add_label(fig: go.Figure, x: float, y: float, text: str) -> None:
    fig.add_annotation(x=x, y=y, text=text, xanchor="center", yanchor="middle")
