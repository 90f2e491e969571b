"""What do all layers bring together? Attention rollout, of attention and SSD alike.

    R = R_L ⋯ R_1,  R_l = ½ I + ½ Ā_l

Ā_l is |M| of layer l, averaged over its heads, each row normalised; ½ I stands for the residual
stream. State transforms move nothing between positions. The level of chance is a model of uniform
layers, Ā_ij = 1 / (i + 1).

Source: Abnar and Zuidema 2020. Departs: |M| where M is signed, M̃ with D on its diagonal for SSD.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from analysis.base import Finding, NotApplicableError, Subject, Words, describe, draw
from analysis.links import find_links
from analysis.memory import LONGEST_ROLLED
from analysis.mixing import Mixer, collect_mixers
from analysis.plain import figure_only
from analysis.plots.heatmaps import Heatmap, choose_pool, draw_heatmap, make_picture, pool_matrix
from analysis.statistics.intervals import bootstrap
from analysis.words import percent, percents
from lab.laws import MatrixMixer

__all__ = ["TITLE", "Rollout", "describe", "draw", "measure", "multiply_layers"]

TITLE = "All layers in one"
PRODUCTS = 2**35
"""Multiplications in all; they decide how many rows of the batch are rolled out."""
SHOWS = 2.0
"""Recall shows if R to the value is surely this many times what uniform layers would give."""


@dataclass(frozen=True)
class Rollout(Finding):
    """The product of all layers' matrices.

    Attributes:
        depth: how many layers have a mixer.
        on_value: R from queries to the value they ask for, in [0, 1]: mean over a row's queries,
            one entry per row of the batch; empty for a task without pairs.
        interval: of its mean, 95 % by resampling rows; NaN for fewer than two.
        uniform_value: the same of uniform layers, mean.
        on_self: R from positions to themselves, mean over positions, one entry per row.
        uniform_self: the same of uniform layers.
        rows: of the batch.
        shown: R of the first row.
    """

    depth: int
    on_value: Float[np.ndarray, " n"]
    interval: tuple[float, float]
    uniform_value: float
    on_self: Float[np.ndarray, " rows"]
    uniform_self: float
    rows: int
    shown: Heatmap = figure_only()

    def describe(self) -> Words:
        """Say whether recall shows in the product, and how much stays where it was."""
        picture = self.shown.picture
        title = "Rollout of all layers · Π (½ I + ½ Ā), the first test row"
        if picture.pool > 1:
            title += f", max over {picture.pool} × {picture.pool}"
        reading = (
            "R_ij says how much of position j is in position i after the last layer, if every head "
            "counts alike and values, gates and state transforms are ignored; its rows sum to 1. "
            f"Numbers are means over {self.rows} {'row' if self.rows == 1 else 'rows'} of the "
            f"batch. Colours end at {picture.bound:.2g}; ticks on the left mark query rows"
        )
        reading += ", rings where a query meets its value." if self.on_value.size else "."
        says = self._summarize()
        return Words(title, says, reading, f"Heat map of {title}, lower triangle. {says}")

    def _summarize(self) -> str:
        layers = {1: "one layer", 2: "both layers"}.get(self.depth, f"all {self.depth} layers")
        kept = f"{percent(float(self.on_self.mean()))} of a position's mass stays with itself"
        kept += f" (uniform layers: {percent(self.uniform_self)})"
        if not self.on_value.size:
            return f"Through {layers} {kept}; the task names no pairs to look for."
        low, high = self.interval
        ends = "one row" if math.isnan(low) else f"95 %: {' to '.join(percents(low, high))}"
        reached = f"{percent(float(self.on_value.mean()))} ({ends}; "
        reached += f"uniform layers: {percent(self.uniform_value)})"
        bound = SHOWS * self.uniform_value
        if low >= bound:
            says = f"Through {layers} queries reach the value they ask for with {reached}"
        elif high < bound:
            says = f"No recall shows: queries reach their value with {reached}"
        else:
            says = f"It is uncertain whether recall shows: queries reach their value with {reached}"
        return f"{says}; {kept}."

    def draw(self) -> go.Figure:
        """Draw R of the first row, row 0 on top."""
        return draw_heatmap(self.shown)


@torch.no_grad()
def measure(subject: Subject) -> list[Rollout]:
    """Return the rollout.

    Raises:
        NotApplicableError: where no block has a mixer, one offers no matrix, or rows are too long.
        RunError: when a mixer that is not the lab's own raises.
    """
    batch = subject.batch
    layers = collect_mixers(subject.model, batch[:1])
    if not layers:
        raise NotApplicableError("no block has a sequence mixer")
    for mixer in layers:
        if not isinstance(mixer.module, MatrixMixer):
            raise NotApplicableError(f"layer {mixer.layer}, {mixer.kind}, offers no matrix")
    count, seq_len = batch.inputs.shape
    if seq_len > LONGEST_ROLLED:
        raise NotApplicableError(
            f"rows of {seq_len} tokens are too long, must be ≤ {LONGEST_ROLLED}"
        )
    rows = min(count, max(1, PRODUCTS // (len(layers) * seq_len**3)))
    layers = collect_mixers(subject.model, batch[:rows])
    place = torch.arange(1, seq_len + 1, dtype=torch.float32)
    uniform = torch.ones(seq_len, seq_len).tril() / place[:, None]
    uniform = torch.linalg.matrix_power((uniform + torch.eye(seq_len)) / 2, len(layers)).numpy()
    on_value, uniform_value, on_self, first = [], [], [], None
    for row in range(rows):
        links, product = find_links(batch, row), multiply_layers(layers, row).cpu().numpy()
        first = product if row == 0 else first
        on_self.append(product.diagonal().mean())
        if len(links.values):
            pairs = links.queries, links.values
            on_value.append(product[pairs].mean())
            uniform_value.append(uniform[pairs].mean())
    assert first is not None
    causal = np.where(np.tri(seq_len, dtype=bool), first, np.float32(np.nan))[None]
    pool = choose_pool(1, seq_len)
    return [
        Rollout(
            depth=len(layers),
            on_value=np.array(on_value),
            interval=bootstrap(np.array(on_value), np.random.default_rng(subject.seed)),
            uniform_value=float(np.mean(uniform_value)) if uniform_value else math.nan,
            on_self=np.array(on_self),
            uniform_self=float(uniform.diagonal().mean()),
            rows=rows,
            shown=Heatmap.of(subject, make_picture(pool_matrix(causal, pool), pool)),
        )
    ]


def multiply_layers(layers: Sequence[Mixer], row: int) -> Float[Tensor, "t s"]:
    """Return R of one row of the batch; each row of R sums to 1.

    Where a row of |M| has no mass, the position keeps what the residual stream holds.
    """
    seq_len = layers[0].x.shape[1]
    below = torch.eye(seq_len, device=layers[0].x.device)
    for mixer in layers:
        above = torch.empty_like(below)
        for rows, matrix in mixer.blocks(row):
            size = matrix.abs().mean(0)
            mass = size.sum(-1, keepdim=True)
            # Nothing comes from later positions.
            share = size[:, : rows.stop] / mass.clamp(min=torch.finfo(size.dtype).tiny)
            share = share if mixer is layers[0] else share @ below[: rows.stop, : rows.stop]
            mixed = below.new_zeros(len(size), seq_len)
            mixed[:, : rows.stop] = share
            above[rows] = torch.where(mass > 0, (below[rows] + mixed) / 2, below[rows])
        below = above
    return below
