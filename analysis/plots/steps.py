"""Axes of training steps, spaced by log₂(step + 1): step 0 has a place and early steps room."""

import math

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int


def scale_steps(steps: Int[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
    """Return where steps stand on the axis, log₂(step + 1)."""
    return np.log2(steps + 1.0)


def add_step_axis(fig: go.Figure, steps: Int[np.ndarray, " steps"]) -> None:
    """Label the horizontal axes of a figure, whose points stand at `scale_steps`, with steps."""
    last = int(steps[-1])
    ticks = sorted({0, 1, *(4**k for k in range(1, 16) if 3 * 4**k <= 2 * last), last})
    fig.update_xaxes(
        title_text="training step",
        tickvals=scale_steps(np.array(ticks)),
        ticktext=[f"{tick:,}" for tick in ticks],
        range=[-0.15, math.log2(last + 1) + 0.15],
    )
