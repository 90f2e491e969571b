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

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures.picture import Heatmap, choose_pool, draw_heatmap, make_picture, pool_matrix
from analysis.links import find_links
from analysis.memory import LONGEST_ROLLED
from analysis.mixing import BlockMixer, collect_mixers
from analysis.plain import figure_only
from analysis.words import format_ends, percent
from lab.intervals import bootstrap
from lab.layers.mixer import MatrixMixer

__all__ = ["TITLE", "Rollout", "measure", "multiply_layers"]

TITLE = "All layers in one"
PRODUCTS = 2**35
"""Multiplications in all; they decide how many rows of the batch are rolled out."""
SHOWS = 2.0
"""Recall shows if R to the value is surely this many times what uniform layers would give."""


@dataclass(frozen=True)
class Rollout(Finding):
    """The product of all layers' matrices.

    Attributes:
        on_value: R from queries to the value they ask for, in [0, 1]: mean over a row's queries,
            one entry per row of the batch; empty for a task without pairs.
        interval: of its mean, 95 % by resampling rows; NaN for fewer than two.
        uniform_value: the same of uniform layers, mean.
        on_self: R from positions to themselves, mean over positions, one entry per row.
        uniform_self: the same of uniform layers.
    """

    on_value: Float[np.ndarray, " n"]
    interval: tuple[float, float]
    uniform_value: float
    on_self: Float[np.ndarray, " rows"]
    uniform_self: float
    rows: int
    shown: Heatmap = figure_only()
    title: str = figure_only()

    reading = (
        "R_ij says how much of position j is in position i after the last layer, if every head "
        "counts alike and values, gates and state transforms are ignored; its rows sum to 1. Ticks "
        "on the left mark query rows, rings where a query meets its value. Uniform layers have "
        "Ā_ij = 1 / (i + 1)."
    )

    @property
    def says(self) -> str:
        """Whether recall shows in the product."""
        if not self.on_value.size:
            return "The task names no pairs that could be looked for in the product of all layers."
        verdict = "It is uncertain whether recall shows"
        if self.interval[0] >= SHOWS * self.uniform_value:
            verdict = "Recall shows"
        if self.interval[1] < SHOWS * self.uniform_value:
            verdict = "No recall shows"
        return (
            f"{verdict}: through all layers, queries reach the value they ask for with "
            f"{percent(float(self.on_value.mean()))} {format_ends(*self.interval, percent)} "
            f"(uniform layers: {percent(self.uniform_value)})."
        )

    def numbers(self) -> Table:
        """Return what reaches a value, and what stays with a position."""
        rows = tuple(
            (name, percent(float(share.mean())), percent(uniform))
            for name, share, uniform in (
                ("from queries to their value", self.on_value, self.uniform_value),
                ("from positions to themselves", self.on_self, self.uniform_self),
            )
            if share.size
        )
        return Table(("R", f"mean over rows: {self.rows}", "uniform layers"), rows)

    def figure(self) -> go.Figure:
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
    count, seq_len = batch.roles.shape
    if seq_len > LONGEST_ROLLED:
        raise NotApplicableError(
            f"rows of {seq_len} tokens are too long, must be ≤ {LONGEST_ROLLED}"
        )
    rows = min(count, max(1, PRODUCTS // (len(layers) * seq_len**3)))
    layers = collect_mixers(subject.model, batch[:rows])
    place = torch.arange(1, seq_len + 1, dtype=torch.float32)
    uniform = torch.ones(seq_len, seq_len).tril() / place[:, None]
    uniform = torch.linalg.matrix_power((uniform + torch.eye(seq_len)) / 2, len(layers)).numpy()
    on_value, uniform_value, on_self, pictures = [], [], [], []
    pool = choose_pool(1, seq_len)
    title = "Rollout of all layers · Π (½ I + ½ Ā), the first test row"
    for row in range(rows):
        links, product = find_links(batch, row), multiply_layers(layers, row).cpu().numpy()
        on_self.append(product.diagonal().mean())
        if len(links.values):
            pairs = links.queries, links.values
            on_value.append(product[pairs].mean())
            uniform_value.append(uniform[pairs].mean())
        if row == 0:
            causal = np.where(np.tri(seq_len, dtype=bool), product, np.float32(np.nan))[None]
            pictures.append(make_picture(pool_matrix(causal, pool), pool))
    return [
        Rollout(
            on_value=np.array(on_value),
            interval=bootstrap(np.array(on_value), np.random.default_rng(subject.seed)),
            uniform_value=float(np.mean(uniform_value)) if uniform_value else math.nan,
            on_self=np.array(on_self),
            uniform_self=float(uniform.diagonal().mean()),
            rows=rows,
            shown=Heatmap.of(subject, pictures[0]),
            title=title + f", max over {pool} × {pool}" * (pool > 1),
        )
    ]


def multiply_layers(layers: Sequence[BlockMixer], row: int) -> Float[Tensor, "t s"]:
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
