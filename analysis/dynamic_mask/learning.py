"""What the masks of a model learn: their biases, the gradients that reach them, and both by step.

θ is what a mask learns: the table l, or A and dt of a value mask.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Subject, Table, thin
from analysis.dynamic_mask.masks import (
    BANDS,
    MaskedHead,
    MaskedLayer,
    find_masked_layers,
    name_key_head,
    name_mask,
    name_mask_points,
    pick_heads,
    sum_by_role,
)
from analysis.figures import Axis, Colors, Curves, Line, Map, curves, heat
from analysis.plain import figure_only
from analysis.words import capitalize, percent
from lab.hooks import HookPoint
from lab.layers.mask import LiteralMask, SoftMask
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.cross_entropy import linear_cross_entropy
from lab.training.run import Run
from tasks.base import Batch, count_rows

GRADIENT_TOKENS = 2**11
"""Number of tokens of the rows whose loss is differentiated."""
MARKS = 256
"""Maximum number of marks along the positions of a row; in longer rows, neighbours share a mark."""
STEPS = 24
"""Maximum number of steps of a run at which its masks are measured."""


class LearnedMask(NamedTuple):
    """What a layer's mask has learned.

    Attributes:
        values: by head and position: l of a table, else the mean bias, nats.
        theta: its parameters, flat; none for a mask that is told what to keep.
        gradient: ‖∂loss/∂θ‖ of the mean loss in nats; exactly 0 if none reaches it, NaN without θ.
    """

    values: Float[np.ndarray, "h t"]
    theta: Float[Tensor, " n"]
    gradient: float


@dataclass(frozen=True)
class BiasValues(Finding):
    """The biases by head.

    Attributes:
        bias_by_role: mean bias of a role's keys, nats; NaN for a role that does not occur.
        lightest: least weight, relative to the most favoured key's, that a bias leaves; in (0, 1].
        gradients: by layer with a mask, ‖∂loss/∂θ‖ at these weights, as in `LearnedMask`.
        width: positions per mark of the figure.
        bias: mean bias by role and mark.
        spread: its standard deviation over rows of the batch and positions of the mark.
    """

    title = "Mask biases by position and role, means over rows"
    reading = (
        "A key's bias is added to all its attention scores. Only differences count in the softmax: "
        "a difference of b multiplies the weight by e^b. Whiskers: standard deviation over rows, "
        f"none for a table of positions. In rows of more than {MARKS} tokens neighbours share a "
        "mark. Of more than 8 heads, those whose masks act most are shown."
    )
    names: tuple[str, ...]
    readings: tuple[str, ...]
    role_names: tuple[str, ...]
    bias_by_role: Float[np.ndarray, "n roles"]
    lightest: tuple[float, ...]
    gradients: tuple[float, ...]
    width: int
    bias: Float[np.ndarray, "n roles bins"] = figure_only()
    spread: Float[np.ndarray, "n roles bins"] = figure_only()

    @property
    def says(self) -> str:
        """How strongly the strongest mask acts, and which masks no gradient reaches."""
        learning = sum(not math.isnan(gradient) for gradient in self.gradients)
        dead = f"masks with parameters that no gradient reaches: {self.gradients.count(0.0)}"
        i = int(np.argmin(self.lightest))
        if self.lightest[i] > 1 - 1e-6:
            return f"No bias acts, as all keys have the same one; {dead} of {learning}."
        return (
            f"The {self.readings[i]} mask of {self.names[i]} acts most strongly: the weight of the "
            f"least favoured key is {percent(self.lightest[i])} of that of the most favoured one; "
            f"{dead} of {learning}."
        )

    def numbers(self) -> Table:
        """Return the strength of each head's mask, and its mean biases by role."""
        columns = ("head", "mask", "least weight", *(f"bias, {name}" for name in self.role_names))
        rows = []
        for i in pick_heads(self.lightest):
            biases = ("–" if math.isnan(b) else f"{b:.3g}" for b in self.bias_by_role[i])
            rows.append((self.names[i], self.readings[i], percent(self.lightest[i]), *biases))
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the mean bias by position, a panel per head, a mark per role."""
        at = (np.arange(self.bias.shape[2]) + 0.5) * self.width - 0.5
        panels = []
        for i in pick_heads(self.lightest):
            ends = np.stack([self.bias[i] - self.spread[i], self.bias[i] + self.spread[i]], -1)
            lines = [
                Line(name, at, self.bias[i, role], ends[role], shape="points")
                for role, name in enumerate(self.role_names)
            ]
            title = f"{self.names[i]} · {self.readings[i]} mask"
            panels.append(Curves(lines, Axis("bias, nats"), title, height=190))
        return curves(panels, Axis("position of the key, tokens"), across=2)


def measure_biases(
    subject: Subject, layers: Sequence[MaskedLayer], heads: Sequence[MaskedHead]
) -> BiasValues:
    """Measure the biases of a subject's masked layers by role and position."""
    batch, names = subject.batch, subject.task.role_names
    seq_len = batch.inputs.shape[1]
    width = math.ceil(seq_len / MARKS)
    mark = torch.arange(seq_len, device=batch.inputs.device) // width
    biases = torch.cat([layer.bias for layer in layers], 1).double()
    count, total, square = (
        sum_by_role(values, batch.roles, len(names), mark, math.ceil(seq_len / width))
        for values in (torch.ones_like(biases[:, :1]), biases, biases.square())
    )
    with np.errstate(invalid="ignore"):
        mean = total / count
        return BiasValues(
            names=tuple(head.name for head in heads),
            readings=tuple(head.reading for head in heads),
            role_names=names,
            bias_by_role=total.sum(-1) / count.sum(-1),
            lightest=tuple(head.lightest for head in heads),
            gradients=tuple(mask.gradient for mask in read_masks(subject.model, batch)),
            width=width,
            bias=mean,
            spread=np.sqrt(np.maximum(square / count - mean**2, 0.0)),
        )


def read_masks(model: LanguageModel, batch: Batch) -> list[LearnedMask]:
    """Read each layer's mask, and differentiate the loss at scored positions of the first rows."""
    layers, seq_len = find_masked_layers(model), batch.inputs.shape[1]
    batch = batch[: count_rows(GRADIENT_TOKENS, seq_len)]
    biases: list[Tensor] = []

    def keep(bias: Tensor, point: HookPoint) -> None:
        biases.append(bias.detach()[:, :, 0].mean(0))

    learned = [
        [p for _, p in sorted(module.mask.named_parameters())] if module.mask else []
        for module in layers.values()
    ]
    every = [p for own in learned for p in own]
    with model.hooks([(name_mask_points(layers), keep)]), torch.enable_grad():
        hidden, head, targets = score(model, batch, "fp32")
        loss, _ = linear_cross_entropy(hidden, head, targets)
        gradients: Sequence[Tensor | None] = [None] * len(every)
        if every and loss.requires_grad:
            gradients = torch.autograd.grad(loss, every, allow_unused=True)
    of_each = dict(zip(every, gradients, strict=True))
    found = []
    for module, own, bias in zip(layers.values(), learned, biases, strict=True):
        mask = module.mask
        values = mask.l.detach()[:, :seq_len] if isinstance(mask, LiteralMask | SoftMask) else bias
        squares = [g.double().square().sum() for p in own if (g := of_each[p]) is not None]
        size = math.sqrt(sum(map(float, squares))) if own else math.nan
        theta = [p.detach().double().flatten() for p in own] or [torch.zeros(0)]
        found.append(LearnedMask(values.float().cpu().numpy(), torch.cat(theta), size))
    return found


@dataclass(frozen=True)
class MaskTrajectory(Finding):
    """The masks' values over training, by marks and bands of positions.

    Attributes:
        table: whether the values are entries of a table l, otherwise they are mean biases.
        by_band: mean value in each of `BANDS` equal bands of positions.
        width: positions per cell of the figure.
        values: mean value per cell.
    """

    title = "Values of the masks by training step and position"
    reading = (
        "Each row is a step whose weights the run kept, the first at the bottom. Steps are closer "
        "together around a jump. A literal or straight-through mask hides keys with l < ½. In rows "
        f"of more than {MARKS} tokens a cell is the mean of neighbours. Of more than 8 heads, "
        "those whose values move most are shown."
    )
    names: tuple[str, ...]
    table: bool
    steps: Int[np.ndarray, " steps"]
    by_band: Float[np.ndarray, "steps n bands"]
    width: int
    values: Float[np.ndarray, "steps n bins"] = figure_only()

    @property
    def says(self) -> str:
        """Which head's values move most, and where they end."""
        moved = np.ptp(self.values, axis=0).max(-1)
        i = int(moved.argmax())
        if moved[i] == 0:
            return "No value ever changes."
        start, end, bands = self.values[0, i], self.values[-1, i], self.by_band[-1, i]
        return (
            f"{capitalize(self.names[i])} moves most: its values range from {start.min():.3g} to "
            f"{start.max():.3g} at step {self.steps[0]:,} and from {end.min():.3g} to "
            f"{end.max():.3g} at step {self.steps[-1]:,}, where its bands of positions have means "
            f"from {bands.min():.3g} (band {bands.argmin() + 1}) to {bands.max():.3g} (band "
            f"{bands.argmax() + 1} of {len(bands)})."
        )

    def figure(self) -> go.Figure:
        """Draw the values by position and, upwards, step, a panel per head."""
        at = np.arange(self.values.shape[2]) * self.width + (self.width - 1) / 2
        rows, labels = np.arange(len(self.steps)), [f"{step:,}" for step in self.steps]
        notes = [[f"step {step}, position {place:.0f}" for place in at] for step in labels]
        maps = [
            Map(self.values[:, i], rows, at, self.names[i], notes=notes)
            for i in pick_heads((-np.ptp(self.values, axis=(0, 2))).tolist())
        ]
        ticks = {float(i): labels[i] for i in thin(rows.tolist(), 8)}
        ends = float(self.values.min()), float(self.values.max())
        colors = Colors("table entry l" if self.table else "bias, nats", ends=ends)
        x, y = Axis("position of the key, tokens"), Axis("training step", ticks=ticks)
        return heat(maps, colors, x, y, across=2, row=180 / len(rows))


@dataclass(frozen=True)
class MaskHistory(Finding):
    """How far the masks moved over a run.

    Attributes:
        steps: at most `STEPS` of the run's, the first and the last among them.
        gradients: ‖∂loss/∂θ‖ by step and layer, as in `LearnedMask`.
        drifts: ‖θ − θ₀‖ by step and layer; NaN if the mask has no parameters.
    """

    title = "How far the masks moved, and the gradient that moves them"
    reading = (
        "θ is what a mask learns: the table l, or A and dt of a value mask. Above: the Euclidean "
        "distance from θ at the first step. Below: the gradient of the mean loss, in nats, at "
        "scored positions. Steps are spaced by log₂(step + 1)."
    )
    steps: Int[np.ndarray, " steps"]
    layers: tuple[int, ...]
    readings: tuple[str, ...]
    gradients: Float[np.ndarray, "steps layers"]
    drifts: Float[np.ndarray, "steps layers"]

    @property
    def says(self) -> str:
        """Which mask moves furthest, and which masks are dead."""
        dead = f"masks whose gradient is 0 at every step: {(self.gradients == 0).all(0).sum()}"
        dead += f" of {(~np.isnan(self.gradients[0])).sum()}"
        if not np.nanmax(self.drifts[-1]):
            return f"No mask has moved between the first and the last step; {dead}."
        i = int(np.nanargmax(self.drifts[-1]))
        at = int(np.nanargmax(self.gradients[:, i]))
        return (
            f"The mask of layer {self.layers[i]} moves furthest, by {self.drifts[-1, i]:.2g}, its "
            f"gradient is largest, {self.gradients[at, i]:.2g}, at step {self.steps[at]:,}; {dead}."
        )

    def figure(self) -> go.Figure:
        """Draw the drift above and the gradient below, by step, a line per layer."""
        masks = zip(self.layers, self.readings, strict=True)
        names = [f"layer {layer} · {reading}" for layer, reading in masks]
        panels = [
            Curves(
                [Line(name, self.steps, y) for name, y in zip(names, of.T, strict=True)],
                Axis(title, ends=(0, float(np.nanmax(of)) * 1.05 or 1)),
                height=160,
            )
            for title, of in (("‖θ − θ₀‖", self.drifts), ("‖∂loss/∂θ‖", self.gradients))
        ]
        return curves(panels, Axis("training step", scale="steps"))


def measure_history(run: Run, batch: Batch) -> list[Finding]:
    """Measure a run's masks at up to `STEPS` of its steps, on rows of the batch.

    Returns:
        the values of the masks that learn a table, those of the other masks that learn, and how
        far they moved; each left out if there is no such mask.
    """
    steps, batch = np.array(thin(run.list_steps(), STEPS)), batch.to("cpu")
    layers, masks = {}, []
    for step in steps.tolist():
        model = run.load_model(step)
        layers = find_masked_layers(model)
        masks.append(read_masks(model, batch))
    gradients = np.array([[mask.gradient for mask in now] for now in masks])
    learns = ~np.isnan(gradients[0])
    if not learns.any():
        return []
    drifts = [
        [(new.theta - old.theta).norm() for new, old in zip(now, masks[0], strict=True)]
        for now in masks
    ]
    tables = [isinstance(module.mask, LiteralMask | SoftMask) for module in layers.values()]
    found: list[Finding] = []
    for table in (True, False):
        mine = [j for j, one in enumerate(tables) if one == table and learns[j]]
        if mine:
            heads = [
                name_key_head(layer, head, module.n_kv_heads)
                for j, (layer, module) in enumerate(layers.items())
                for head in range(module.n_kv_heads)
                if j in mine
            ]
            values = [np.concatenate([now[j].values for j in mine]) for now in masks]
            found.append(trace_values(heads, table, steps, np.stack(values)))
    found.append(
        MaskHistory(
            steps=steps,
            layers=tuple(layers),
            readings=tuple(map(name_mask, layers.values())),
            gradients=gradients,
            drifts=np.where(learns, np.array(drifts), math.nan),
        )
    )
    return found


def trace_values(
    names: Sequence[str],
    table: bool,
    steps: Int[np.ndarray, " steps"],
    values: Float[np.ndarray, "steps n t"],
) -> MaskTrajectory:
    """Return some heads' values over training, by marks and bands of positions."""
    seq_len = values.shape[2]
    band, width = np.arange(seq_len) * BANDS // seq_len, math.ceil(seq_len / MARKS)
    starts = np.arange(0, seq_len, width)
    by_band = [values[..., band == one].mean(-1) for one in np.unique(band)]
    sums = np.add.reduceat(values, starts, axis=-1)
    sizes = np.diff([*starts, seq_len])
    return MaskTrajectory(tuple(names), table, steps, np.stack(by_band, -1), width, sums / sizes)
