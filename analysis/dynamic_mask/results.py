"""What is found of a model's dynamic masks: values, whom they keep, what they do, how they came."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import NotApplicableError, Subject
from analysis.dynamic_mask.heads import Head, head_name, heads
from analysis.dynamic_mask.history import Beyond, History, beyond, history, learn, without_masks
from analysis.dynamic_mask.masking import Seen, masked_layers, see
from analysis.record import figure_only
from analysis.scoring import scored
from analysis.statistics.estimates import (
    Estimate,
    estimate_accuracy,
    estimate_ratio,
    sum_by_row,
    westfall_young,
)

BINS = 256
"""Most positions that are drawn; of more, neighbours share a mark."""
BANDS = 8
"""Equal bands of positions, by which shares are recorded."""


@dataclass(frozen=True)
class Values:
    """The biases, by head.

    Attributes:
        names: of the heads.
        readings: of their masks.
        role_names: the task's.
        bias_by_role: mean bias of a role's keys, nats; NaN for a role that is not there.
        lightest: least weight, beside the most favoured key's, that a bias leaves; in (0, 1].
        layers: which have a mask.
        gradients: of each layer, ‖∂loss/∂θ‖ at these weights; exactly 0 where none reaches the
            mask, NaN where it learns nothing.
        width: positions a mark.
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


@dataclass(frozen=True)
class Selection:
    """Which keys are kept."""

    heads: tuple[Head, ...]
    role_names: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """Where in the row keys are kept: `kept_by_band` of the heads.

    Attributes:
        role_names: the task's.
        bands: first position of each band, and the length.
        heads: as in `Selection`, where it is recorded.
    """

    role_names: tuple[str, ...]
    bands: tuple[int, ...]
    heads: tuple[Head, ...] = figure_only()


@dataclass(frozen=True)
class Effect:
    """What attention, and the answers, make of the masks.

    Attributes:
        accuracy: share of right answers; chance is the task's.
        layers: which have a mask.
        removal: of each layer, the accuracy with its biases at zero less that as it is; a window
            then keeps the latest keys.
        harm: of each layer, p that the largest of these changes is as high where none is a gain.
        beyond: past the length of these rows.
        heads: as in `Selection`.
    """

    accuracy: Estimate
    layers: tuple[int, ...]
    removal: tuple[Estimate, ...]
    harm: tuple[float, ...]
    beyond: Beyond
    heads: tuple[Head, ...] = figure_only()


@dataclass(frozen=True)
class Trajectory:
    """The masks' values over training, as in `History`, and by bands of positions.

    Attributes:
        names: of the heads.
        table: whether values are entries of a table l; else they are biases.
        steps: of the run.
        by_band: mean value in each of equal bands of positions.
        width: positions a cell.
        values: means over its positions.
    """

    names: tuple[str, ...]
    table: bool
    steps: Int[np.ndarray, " steps"]
    by_band: Float[np.ndarray, "steps n bands"]
    width: int
    values: Float[np.ndarray, "steps n bins"] = figure_only()


def measure(subject: Subject) -> list[Values | Selection | Kept | Effect | Trajectory | History]:
    """Return the biases, whom they keep, what they do, and how they came to be where a run tells.

    Raises:
        NotApplicableError: where no block has a dynamic mask.
    """
    layers = masked_layers(subject.model)
    if not layers:
        raise NotApplicableError("no block has a dynamic mask")
    rng = np.random.default_rng(subject.seed)
    n_roles = len(subject.task.role_names)
    seen = see(subject.model, subject.batch)
    found = tuple(
        head for layer in seen for head in heads(layer, subject.batch, n_roles, BANDS, rng)
    )
    results: list[Values | Selection | Kept | Effect | Trajectory | History] = [
        _values(subject, seen, found),
        Selection(found, subject.task.role_names),
        _effect(subject, found, rng),
    ]
    if min(head.kept for head in found) < 1:
        seq_len = subject.batch.inputs.shape[1]
        bands = tuple(-(-band * seq_len // BANDS) for band in range(BANDS + 1))
        results.insert(2, Kept(subject.task.role_names, bands, found))
    if subject.run is None or len(subject.run.steps()) < 2:
        return results
    past = history(subject.run, subject.batch)
    learned = [i for i, size in enumerate(past.gradients[0]) if not math.isnan(size)]
    return [*results, *_trajectories(past), *([past] if learned else [])]


def _values(subject: Subject, seen: Sequence[Seen], found: Sequence[Head]) -> Values:
    """Return the biases by role and position."""
    batch, n_roles = subject.batch, len(subject.task.role_names)
    seq_len = batch.inputs.shape[1]
    _, gradients = learn(subject.model, batch)
    place = (batch.roles * seq_len + torch.arange(seq_len, device=batch.roles.device)).flatten()
    counts = torch.bincount(place, minlength=n_roles * seq_len).double()
    biases = torch.cat([rearrange(layer.bias, "b h t -> h (b t)") for layer in seen]).double()

    def sums(values: Float[Tensor, "n q"]) -> Float[Tensor, "n places"]:
        return values.new_zeros(len(values), len(counts)).index_add_(1, place, values)

    means = sums(biases) / counts
    squares = sums((biases - means[:, place]).square())
    width = math.ceil(seq_len / BINS)
    pooled = [
        _binned(rearrange(z, "... (r t) -> ... r t", r=n_roles).cpu().numpy(), width)
        for z in (counts, sums(biases), squares)
    ]
    with np.errstate(invalid="ignore"):
        count, total, square = pooled
        return Values(
            names=tuple(head.name for head in found),
            readings=tuple(head.reading for head in found),
            role_names=subject.task.role_names,
            bias_by_role=total.sum(-1) / count.sum(-1),
            lightest=tuple(head.lightest for head in found),
            layers=tuple(masked_layers(subject.model)),
            gradients=tuple(gradients),
            width=width,
            bias=total / count,
            spread=np.sqrt(square / count),
        )


def _effect(subject: Subject, found: tuple[Head, ...], rng: np.random.Generator) -> Effect:
    """Return what the answers make of the masks, as they are, at zero, and beyond."""
    layers = tuple(masked_layers(subject.model))
    answered = scored(subject.model, subject.batch)
    removal, gains = [], []
    for layer in layers:
        with without_masks(subject.model, [layer]):
            bare = scored(subject.model, subject.batch)
        change = bare.right.double() - answered.right.double()
        sums, counts = sum_by_row(answered, change)
        removal.append(estimate_ratio(sums, counts, 0.0, rng))
        gains.append(sums.cpu().numpy())
    right = estimate_accuracy(answered, subject.task.chance, rng)
    harm = westfall_young(-np.stack(gains, 1), rng)
    return Effect(right, layers, tuple(removal), tuple(harm.tolist()), beyond(subject, rng), found)


def _trajectories(past: History) -> list[Trajectory]:
    """Return the values of the masks that learn a table, and those of the others."""
    seq_len = past.values.shape[2]
    width = math.ceil(seq_len / BINS)
    counts = _binned(np.ones(seq_len), width)
    bands = np.arange(seq_len) * BANDS // seq_len
    names = [
        head_name(layer, head, n_heads)
        for layer, n_heads in zip(past.layers, past.n_heads, strict=True)
        for head in range(n_heads)
    ]
    of_table = np.repeat(past.tables, past.n_heads)
    learns = np.repeat(~np.isnan(past.gradients[0]), past.n_heads)
    return [
        Trajectory(
            names=tuple(name for name, one in zip(names, mine, strict=True) if one),
            table=table,
            steps=past.steps,
            by_band=np.stack(
                [past.values[:, mine][..., bands == band].mean(-1) for band in np.unique(bands)], -1
            ),
            width=width,
            values=_binned(past.values[:, mine], width) / counts,
        )
        for table in (True, False)
        if (mine := learns & (of_table == table)).any()
    ]


def _binned(values: Float[np.ndarray, "*n t"], width: int) -> Float[np.ndarray, "*n bins"]:
    """Return sums over `width` neighbours; the last may be fewer."""
    return np.add.reduceat(values, np.arange(0, values.shape[-1], width), axis=-1)
