"""The biases of each head by position and role, and whether a gradient reaches them."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from analysis.base import Finding, Subject, Words
from analysis.dynamic_mask.gradients import measure_gradients
from analysis.dynamic_mask.masks import MaskedHead, MaskedLayer
from analysis.dynamic_mask.positions import find_width, sum_neighbours
from analysis.plain import figure_only
from analysis.plots.panels import new_panels, note_panels, pick_smallest, title_lowest_axes
from analysis.plots.style import COLORS, SYMBOLS
from analysis.words import name_layers, percent


@dataclass(frozen=True)
class BiasValues(Finding):
    """The biases by head.

    Attributes:
        names: of the heads.
        readings: of the heads' masks, by name.
        role_names: the task's.
        bias_by_role: mean bias of a role's keys, nats; NaN for a role that does not occur.
        lightest: least weight, relative to the most favoured key's, that a bias leaves; in (0, 1].
        layers: indices of the blocks with a mask.
        gradients: by layer, ‖∂loss/∂θ‖ at these weights; exactly 0 if no gradient reaches the
            mask, NaN if it has no parameters.
        width: positions per mark of the figure.
        bias: mean bias by role and position.
        spread: its standard deviation over rows of the batch.
    """

    names: tuple[str, ...]
    readings: tuple[str, ...]
    role_names: tuple[str, ...]
    bias_by_role: Float[np.ndarray, "n roles"]
    lightest: tuple[float, ...]
    layers: tuple[int, ...]
    gradients: tuple[float, ...]
    width: int
    bias: Float[np.ndarray, "n roles bins"] = figure_only()
    spread: Float[np.ndarray, "n roles bins"] = figure_only()

    def describe(self) -> Words:
        """Describe the mask that acts most strongly, or why none acts."""
        title = "Mask biases by position and role, means over rows"
        if self.width > 1:
            title += f", {self.width} positions per mark"
        says = self._summarize()
        reading = (
            "A key's bias is added to all its attention scores. Only differences count in the "
            "softmax: a difference of b multiplies the weight by e^b. Whiskers: standard deviation "
            f"over rows, none for a table of positions.{note_panels(len(self.names))}"
        )
        return Words(title, says, reading, f"Dots of mask bias by key position and role. {says}")

    def _summarize(self) -> str:
        dead = [layer for layer, g in zip(self.layers, self.gradients, strict=True) if g == 0.0]
        widest = int(np.argmin(self.lightest))
        if dead:
            one = len(dead) == 1
            says = f"The mask{'s' * (not one)} of {name_layers(dead)} {'is' if one else 'are'} dead"
            return f"{says}: no gradient reaches {'it' if one else 'them'}."
        if self.readings[widest] == "oracle":
            return "The mask is told which keys are stored and keeps those; it learns nothing."
        if self.lightest[widest] > 1 - 1e-6:
            return "All keys have the same bias, which cancels in the softmax: no bias acts yet."
        means = self.bias_by_role[widest]
        low, high = int(np.nanargmin(means)), int(np.nanargmax(means))
        says = (
            f"The {self.readings[widest]} mask acts most strongly in {self.names[widest]}: the "
            f"weight of the least favoured key is {percent(self.lightest[widest])} of that of the "
            "most favoured one"
        )
        if low == high:
            return f"{says}."
        return (
            f"{says}; mean biases by role range from {means[low]:.4g} ({self.role_names[low]}) "
            f"to {means[high]:.4g} ({self.role_names[high]})."
        )

    def draw(self) -> go.Figure:
        """Draw the mean bias by position, a panel per head, a mark per role."""
        shown = pick_smallest(self.lightest)
        titles = [f"{self.names[i]} · {self.readings[i]} mask" for i in shown]
        fig, places = new_panels(titles, 190)
        at = (np.arange(self.bias.shape[2]) + 0.5) * self.width - 0.5
        for i, (row, column) in zip(shown, places, strict=True):
            for role, name in enumerate(map(html.escape, self.role_names)):
                there = np.isfinite(self.bias[i, role])
                whiskers = self.spread[i, role, there]
                fig.add_scatter(
                    x=at[there],
                    y=self.bias[i, role, there],
                    mode="markers",
                    marker={
                        "color": COLORS[role % len(COLORS)],
                        "symbol": SYMBOLS[role % len(SYMBOLS)],
                        "size": 6,
                    },
                    error_y={"array": whiskers, "thickness": 0.8, "width": 0}
                    if (whiskers > 0).any()
                    else None,
                    name=name,
                    legendgroup=self.role_names[role],
                    showlegend=i == shown[0],
                    hovertemplate=f"{name} at %{{x:.0f}}: %{{y:.3g}}<extra></extra>",
                    row=row,
                    col=column,
                )
        fig.update_yaxes(title_text="bias, nats", col=1)
        title_lowest_axes(fig, places, "position of the key, tokens")
        return fig


def measure_biases(
    subject: Subject, layers: Sequence[MaskedLayer], heads: Sequence[MaskedHead]
) -> BiasValues:
    """Measure the biases of a subject's masked layers by role and position."""
    batch, n_roles = subject.batch, len(subject.task.role_names)
    seq_len = batch.inputs.shape[1]
    _, gradients = measure_gradients(subject.model, batch)
    place = (batch.roles * seq_len + torch.arange(seq_len, device=batch.roles.device)).flatten()
    counts = torch.bincount(place, minlength=n_roles * seq_len).double()
    biases = torch.cat([rearrange(layer.bias, "b h t -> h (b t)") for layer in layers]).double()

    def sum_places(values: Float[Tensor, "n q"]) -> Float[Tensor, "n places"]:
        return values.new_zeros(len(values), len(counts)).index_add_(1, place, values)

    means = sum_places(biases) / counts
    squares = sum_places((biases - means[:, place]).square())
    width = find_width(seq_len)
    count, total, square = (
        sum_neighbours(rearrange(z, "... (r t) -> ... r t", r=n_roles).cpu().numpy(), width)
        for z in (counts, sum_places(biases), squares)
    )
    with np.errstate(invalid="ignore"):
        return BiasValues(
            names=tuple(head.name for head in heads),
            readings=tuple(head.reading for head in heads),
            role_names=subject.task.role_names,
            bias_by_role=total.sum(-1) / count.sum(-1),
            lightest=tuple(head.lightest for head in heads),
            layers=tuple(layer.layer for layer in layers),
            gradients=tuple(gradients),
            width=width,
            bias=total / count,
            spread=np.sqrt(square / count),
        )
