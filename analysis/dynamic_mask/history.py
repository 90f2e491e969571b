"""How far the masks moved over training, and the gradients that moved them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from plotly.subplots import make_subplots
from torch import Tensor, nn

from analysis.base import Finding, Words
from analysis.dynamic_mask.gradients import list_parameters, measure_gradients
from analysis.dynamic_mask.masks import TableMask, find_masked_layers, name_mask
from analysis.plain import figure_only
from analysis.plots.steps import add_step_axis, scale_steps
from analysis.plots.style import COLORS, DASHES, MUTED, SYMBOLS, new_figure
from analysis.statistics.estimates import thin
from analysis.words import name_layers
from lab.layers.attention import Attention
from lab.training.run import Run
from tasks.base import Batch

STEPS = 24
"""Maximum number of steps of a run at which its masks are measured."""


@dataclass(frozen=True)
class MaskHistory(Finding):
    """The masks over a run.

    Attributes:
        steps: at most `STEPS` of the run's, the first and the last among them.
        layers: indices of the blocks with a mask.
        n_heads: number of key heads, by layer.
        readings: the mask's name, by layer.
        tables: whether the mask learns a table of positions, by layer.
        gradients: ‖∂loss/∂θ‖ by step and layer, of the mean loss in nats; NaN if the mask has no
            parameters.
        drifts: ‖θ − θ₀‖ by step and layer; NaN likewise.
        values: by step, head (layer by layer) and position: l of a table, else the mean bias.
    """

    steps: Int[np.ndarray, " steps"]
    layers: tuple[int, ...]
    n_heads: tuple[int, ...]
    readings: tuple[str, ...]
    tables: tuple[bool, ...]
    gradients: Float[np.ndarray, "steps layers"]
    drifts: Float[np.ndarray, "steps layers"]
    values: Float[np.ndarray, "steps heads t"] = figure_only()

    def describe(self) -> Words:
        """Describe the mask that moves furthest, and the masks that are dead."""
        gradients = self.gradients.T
        dead = [layer for layer, g in zip(self.layers, gradients, strict=True) if (g == 0).all()]
        if len(dead) == len(self.layers):
            says = (
                f"The masks are dead: the gradient is exactly 0 at each of {len(self.steps)} "
                f"steps, and they move by at most {np.nanmax(self.drifts):.2g}."
            )
        elif not np.nanmax(self.drifts[-1]):
            says = "No mask is elsewhere at the last step than at the first."
        else:
            i = int(np.nanargmax(self.drifts[-1]))
            at = int(np.nanargmax(gradients[i]))
            says = (
                f"The mask of layer {self.layers[i]} moves furthest, by {self.drifts[-1, i]:.2g}; "
                f"its gradient is largest, {gradients[i, at]:.2g}, at step {self.steps[at]:,}."
            )
        if 0 < len(dead) < len(self.layers):
            says += f" The mask of {name_layers(dead)} is dead: its gradient is always 0."
        return Words(
            title="How far the masks moved, and the gradient that moves them",
            says=says,
            reading="θ is what a mask learns: the table l, or A and dt of a value mask. Above: the "
            "Euclidean distance from θ at the first step. Below: the gradient of the mean loss, in "
            "nats, at scored positions. Steps are spaced by log₂(step + 1).",
            alt=f"Lines of drift and gradient by step. {says}",
        )

    def draw(self) -> go.Figure:
        """Draw the drift above and the gradient below, by step, a line per layer."""
        empty = new_figure(height=440)
        fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09, figure=empty)
        panels = (("‖θ − θ₀‖", self.drifts), ("‖∂loss/∂θ‖", self.gradients))
        for row, (title, values) in enumerate(panels, start=1):
            for i, (layer, reading) in enumerate(zip(self.layers, self.readings, strict=True)):
                name, own = f"layer {layer} · {reading}", i < len(COLORS)
                fig.add_scatter(
                    x=scale_steps(self.steps),
                    y=values[:, i],
                    mode="lines+markers",
                    line={"color": COLORS[i] if own else MUTED, "dash": DASHES[i % len(DASHES)]},
                    marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 6},
                    name=name,
                    legendgroup=name,
                    showlegend=row == 1 and own,
                    text=[f"{step:,}" for step in self.steps],
                    hovertemplate=f"{name}, step %{{text}}: %{{y:.3g}}<extra></extra>",
                    row=row,
                    col=1,
                )
            fig.update_yaxes(
                title_text=title, rangemode="tozero", exponentformat="power", row=row, col=1
            )
        add_step_axis(fig, self.steps)
        fig.update_xaxes(title_text=None, showticklabels=False, row=1, col=1)
        return fig.update_layout(margin_t=84)


def measure_history(run: Run, batch: Batch) -> MaskHistory:
    """Measure a run's masks at up to `STEPS` of its steps, on rows of the batch."""
    steps = thin(run.list_steps(), STEPS)
    batch = batch.to("cpu")
    start: list[Float[Tensor, " n"]] = []
    values, gradients, drifts = [], [], []
    layers: dict[int, Attention] = {}
    for step in steps:
        model = run.load_model(step)
        layers = find_masked_layers(model)
        now = [_flatten(list_parameters(model, i)) for i in layers]
        start = start or now
        of_layers, sizes = measure_gradients(model, batch)
        values.append(np.concatenate(of_layers))
        gradients.append(sizes)
        drifts.append(
            [
                float((new - old).norm()) if len(new) else math.nan
                for new, old in zip(now, start, strict=True)
            ]
        )
    return MaskHistory(
        steps=np.array(steps),
        layers=tuple(layers),
        n_heads=tuple(module.n_kv_heads for module in layers.values()),
        readings=tuple(name_mask(module) for module in layers.values()),
        tables=tuple(isinstance(module.mask, TableMask) for module in layers.values()),
        gradients=np.array(gradients),
        drifts=np.array(drifts),
        values=np.stack(values),
    )


def _flatten(parameters: Sequence[nn.Parameter]) -> Float[Tensor, " n"]:
    parts = [p.detach().double().flatten() for p in parameters]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
