"""Figures of heads: dots with a line per head, and a curve per head."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int, Shaped

from analysis.figures.curves import Line
from analysis.figures.pairs import Pairs, pairs

LINES = 24
"""Maximum number of heads with a line of their own; with more, the heads of a layer share one."""
NAMED = 5
"""Maximum number of heads whose curves have a colour each."""


def name_heads(layers: Int[np.ndarray, " h"], heads: Int[np.ndarray, " h"]) -> list[str]:
    """Return "layer.head" for each head."""
    return [f"{layer}.{head}" for layer, head in zip(layers, heads, strict=True)]


def draw_heads(
    layers: Int[np.ndarray, " h"], heads: Int[np.ndarray, " h"], panels: Sequence[Pairs]
) -> go.Figure:
    """Draw dots, a line for each head; of many heads, a line for each layer.

    Args:
        panels: the quantities, of all heads; those without a value are left out.
    """
    names, lines, title = name_heads(layers, heads), np.arange(len(layers)), "layer.head"
    notes = [f"head {name}" for name in names]
    if len(names) > LINES:
        distinct, lines = np.unique(layers, return_inverse=True)
        names, title = [str(layer) for layer in distinct.tolist()], "layer"
    shown = [
        replace(panel, dots=[replace(dots, lines=lines, notes=notes) for dots in panel.dots])
        for panel in panels
        if any(np.isfinite(dots.values).any() for dots in panel.dots)
    ]
    return pairs(names, shown, title=title)


def make_head_lines(
    names: Sequence[str],
    x: Shaped[np.ndarray, " n"],
    y: Float[np.ndarray, "h n"],
    extremes: Sequence[int],
) -> list[Line]:
    """Return a curve for each head; of more than `NAMED` heads, all but the extremes are muted."""
    named = range(len(names)) if len(names) <= NAMED else extremes
    lines = []
    for head, name in enumerate(names):
        label, look = (f"head {name}", None) if head in named else ("", -1)
        lines.append(Line(label, x, y[head], look=look, notes=[f"head {name}"] * len(x)))
    return sorted(lines, key=lambda line: line.name != "")
