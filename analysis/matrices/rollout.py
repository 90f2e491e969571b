"""What do all layers bring together? Attention rollout, of attention and SSD alike.

    R = R_L ⋯ R_1,  R_l = ½ I + ½ Ā_l

Ā_l is |M| of layer l, mean over its heads, each row normalised; the ½ I is the residual stream's
part. State transforms move nothing between positions. A uniform layer, Ā_ij = 1 / (i + 1), is what
chance would be.

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

from analysis.base import NotApplicableError, Subject, Words
from analysis.links import find_links
from analysis.mixing import Mixer, collect_mixers
from analysis.plots import heatmaps as pictures
from analysis.record import figure_only
from analysis.statistics.intervals import bootstrap
from analysis.words import percent
from lab.laws import MatrixMixer

TITLE = "All layers in one"
PRODUCTS = 2**35
"""Multiplications in all, which says how many rows of the batch are rolled out."""
LONGEST = 4096
"""Tokens of the longest rows: products of matrices grow with their cube."""
SHOWS = 2.0
"""How many times what uniform layers would bring to the value must surely be there for recall."""


@dataclass(frozen=True)
class Rollout:
    """The layers' matrices in one.

    Attributes:
        depth: how many layers have a mixer.
        on_value: R from queries to the value they ask for, in [0, 1]: mean over a row's queries,
            a row of the batch an entry; none for a task without pairs.
        interval: of its mean, 95 % by resampling rows; NaN for fewer than two.
        uniform_value: the same of uniform layers, mean.
        on_self: R from positions to themselves, mean over positions, a row of the batch an entry.
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
    shown: pictures.Mixing = figure_only()


@torch.no_grad()
def measure(subject: Subject) -> list[Rollout]:
    """Return the rollout.

    Raises:
        NotApplicableError: where no block has a mixer, one offers no matrix, or rows are too long.
        RunError: when a mixer that is not the lab's own raises.
    """
    batch = subject.batch
    found = collect_mixers(subject.model, batch[:1])
    if not found:
        raise NotApplicableError("no block has a sequence mixer")
    for mixer in found:
        if not isinstance(mixer.module, MatrixMixer):
            raise NotApplicableError(f"layer {mixer.layer}, {mixer.kind}, offers no matrix")
    count, seq_len = batch.inputs.shape
    if seq_len > LONGEST:
        raise NotApplicableError(f"rows of {seq_len} tokens are too long, must be ≤ {LONGEST}")
    rows = min(count, max(1, PRODUCTS // (len(found) * seq_len**3)))
    found = collect_mixers(subject.model, batch[:rows])
    place = torch.arange(1, seq_len + 1, dtype=torch.float32)
    uniform = torch.ones(seq_len, seq_len).tril() / place[:, None]
    uniform = torch.linalg.matrix_power((uniform + torch.eye(seq_len)) / 2, len(found)).numpy()
    on_value, uniform_value, on_self, first = [], [], [], None
    for row in range(rows):
        links, rolled = find_links(batch, row), rollout(found, row).cpu().numpy()
        first = rolled if row == 0 else first
        on_self.append(rolled.diagonal().mean())
        if len(links.values):
            pairs = links.queries, links.values
            on_value.append(rolled[pairs].mean())
            uniform_value.append(uniform[pairs].mean())
    assert first is not None
    return [
        Rollout(
            depth=len(found),
            on_value=np.array(on_value),
            interval=bootstrap(np.array(on_value), np.random.default_rng(subject.seed)),
            uniform_value=float(np.mean(uniform_value)) if uniform_value else math.nan,
            on_self=np.array(on_self),
            uniform_self=float(uniform.diagonal().mean()),
            rows=rows,
            shown=_shown(subject, first),
        )
    ]


def rollout(layers: Sequence[Mixer], row: int) -> Float[Tensor, "t s"]:
    """Return R of one row of the batch; rows of R sum to 1.

    A row of |M| without any mass keeps what the residual stream holds.
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


def _shown(subject: Subject, rolled: Float[np.ndarray, "t s"]) -> pictures.Mixing:
    """Return the first row's rollout as `pictures.draw` takes it."""
    causal = np.where(np.tri(len(rolled), dtype=bool), rolled, np.float32(np.nan))[None]
    pool = pictures.choose_pool(1, len(rolled))
    return pictures.Mixing(
        layer=0,
        mixer="Rollout",
        form="Π (½ I + ½ Ā)",
        picture=pictures.make_picture(pictures.pool_matrix(causal, pool), pool),
        mass=None,
        cropped=False,
        links=find_links(subject.batch),
        tokens=subject.batch.inputs[0].cpu().numpy(),
        roles=subject.batch.roles[0].cpu().numpy(),
        role_names=subject.task.role_names,
    )


def describe(found: Rollout) -> Words:
    """Put the rollout in words."""
    assert found.shown.picture is not None
    picture = found.shown.picture
    title = "Rollout of all layers · Π (½ I + ½ Ā), the first test row"
    if picture.pool > 1:
        title += f", max over {picture.pool} × {picture.pool}"
    kept = f"{percent(float(found.on_self.mean()))} of a position's mass stays with itself"
    kept += f" (uniform layers: {percent(found.uniform_self)})"
    if not found.on_value.size:
        says = f"Through {_layers(found.depth)} {kept}; the task names no pairs to look for."
    else:
        here = float(found.on_value.mean())
        low, high = found.interval
        ends = "one row" if math.isnan(low) else f"95 %: {percent(low)} to {percent(high)}"
        against = f"{percent(here)} ({ends}; uniform layers: {percent(found.uniform_value)})"
        bound = SHOWS * found.uniform_value
        if low >= bound:
            says = f"Through {_layers(found.depth)} queries reach the value they ask for with "
            says += f"{against}; {kept}."
        else:
            known = "No recall shows" if high < bound else "Whether recall shows is not sure"
            says = f"{known}: queries reach their value with {against}; {kept}."
    reading = (
        "R_ij says how much of position j is in position i after the last layer, if every head "
        "counts alike and values, gates and state transforms are set aside; its rows sum to 1. "
        f"Numbers are means over {found.rows} {'row' if found.rows == 1 else 'rows'} of the batch. "
        f"Colours end at {picture.bound:.2g}; ticks on the left mark query rows"
    )
    reading += ", rings where a query meets its value." if found.on_value.size else "."
    return Words(title, says, reading, f"Heat map of {title}, lower triangle. {says}")


def _layers(depth: int) -> str:
    return "one layer" if depth == 1 else f"all {depth} layers"


def draw(found: Rollout) -> go.Figure | None:
    """Draw R of the first row, row 0 on top."""
    return pictures.draw(found.shown)
