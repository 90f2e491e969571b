"""What becomes of a model's answers without some experts of a layer, and without any."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from analysis.experts.deletion import Site
from analysis.statistics.intervals import bootstrap

NEAR = 5
"""A twin is drawn among so many whose number of choices is nearest."""


@dataclass(frozen=True)
class Change:
    """What a deletion changes, means over the scored positions with 95 % intervals over rows.

    Attributes:
        loss: of the loss, nats; above 0 it was needed.
        loss_interval: its ends; NaN for a single row.
        accuracy: of the accuracy, a share; below 0 it was needed.
        accuracy_interval: likewise.
    """

    loss: float
    loss_interval: tuple[float, float]
    accuracy: float
    accuracy_interval: tuple[float, float]


@dataclass(frozen=True)
class Deletion:
    """An expert without which the model was run.

    Attributes:
        place: its row and column key.
        twin: whether it is a placebo: chosen about as often as one of the most loaded.
        choices: its share of the layer's choices.
        load: its share of Σ |w|.
        change: what became of the answers.
    """

    place: tuple[int, int]
    twin: bool
    choices: float
    load: float
    change: Change


@dataclass(frozen=True)
class RoleDeletion:
    """Deletions at the tokens of one role alone.

    Attributes:
        role: its name.
        tokens: how many there are.
        everything: all the layer's experts deleted there.
        one: its most loaded expert deleted there.
    """

    role: str
    tokens: int
    everything: Change
    one: Change


@dataclass(frozen=True)
class LayerKnockout:
    """A layer without some experts, and without any.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        n_experts: rows of its tables.
        rows: of the batch, on which it was tried.
        scored: positions behind each mean.
        loss: with all experts, nats.
        accuracy: with all experts.
        deletions: single experts, the most harmful first.
        everything: all experts deleted.
        by_answer: the same over the scored positions of each role, by its name.
        by_role: deletions at the tokens of one role.
        unused: experts that no token chose.
        unused_change: largest change of the layer's output when these are set to zero; 0 unless
            something reads them.
    """

    layer: int
    kind: str
    n_experts: int
    rows: int
    scored: int
    loss: float
    accuracy: float
    deletions: tuple[Deletion, ...]
    everything: Change
    by_answer: dict[str, Change]
    by_role: tuple[RoleDeletion, ...]
    unused: int
    unused_change: float


@dataclass(frozen=True)
class Roles:
    """Which tokens need the experts: `LayerKnockout.by_role` of all layers that were tried.

    Attributes:
        layers: those layers.
    """

    layers: tuple[LayerKnockout, ...]


def layer_knockout(
    site: Site, role_names: Sequence[str], rng: np.random.Generator, n_experts: int = 8
) -> LayerKnockout:
    """Return what a layer does without its most loaded experts, their twins, and all of them.

    Args:
        site: the layer at work.
        role_names: the task's.
        rng: draws twins, and resamples rows.
        n_experts: of the most loaded, and of the twins; fewer where fewer are used.
    """
    loaded = [int(e) for e in np.argsort(-site.loads, kind="stable") if site.counts[e]]
    loaded = loaded[:n_experts]
    choices, columns = site.counts / site.counts.sum(), site.module.shape[1]
    load = site.loads / max(site.loads.sum(), np.finfo(np.float64).tiny)
    deletions = [
        Deletion(
            place=(expert // columns, expert % columns),
            twin=twin,
            choices=float(choices[expert]),
            load=float(load[expert]),
            change=_changes(site, site.choosing(expert), rng)[""],
        )
        for twin, experts in ((False, loaded), (True, _twins(site, loaded, rng)))
        for expert in experts
    ]
    everywhere = torch.ones_like(site.indices, dtype=torch.bool)
    by_answer = _changes(site, everywhere, rng, role_names)
    by_role = []
    for i, role in enumerate(role_names):
        where = site.batch.roles == i
        if where.any():
            at = where[..., None, None]
            by_role.append(
                RoleDeletion(
                    role=role,
                    tokens=int(where.sum()),
                    everything=_changes(site, everywhere & at, rng)[""],
                    one=_changes(site, site.choosing(loaded[0], role=i), rng)[""],
                )
            )
    return LayerKnockout(
        layer=site.layer,
        kind=type(site.module).__name__,
        n_experts=site.n_experts,
        rows=len(site.indices),
        scored=len(site.whole.losses),
        loss=site.whole.losses.mean().item(),
        accuracy=site.clean.accuracy,
        deletions=tuple(sorted(deletions, key=lambda deletion: -deletion.change.loss)),
        everything=by_answer.pop(""),
        by_answer=by_answer,
        by_role=tuple(by_role),
        unused=int((site.counts == 0).sum()),
        unused_change=site.unused_change(),
    )


def _twins(site: Site, loaded: list[int], rng: np.random.Generator) -> list[int]:
    """Return for each of the most loaded another used expert, chosen about as often."""
    left = [int(e) for e in np.flatnonzero(site.counts) if e not in loaded]
    twins = []
    for expert in loaded[: len(left)]:
        # Ties are common among rarely chosen ones: what comes first is left to chance.
        rng.shuffle(left)
        left.sort(key=lambda other: abs(int(site.counts[other]) - int(site.counts[expert])))
        twins.append(left.pop(int(rng.integers(min(NEAR, len(left))))))
    return twins


def _changes(
    site: Site,
    deleted: Bool[Tensor, "b t h k"],
    rng: np.random.Generator,
    role_names: Sequence[str] = (),
) -> dict[str, Change]:
    """Return what a deletion changes over all scored positions, "", and over each role's."""
    outcome = site.without(deleted)
    loss = (outcome.losses - site.whole.losses).double().cpu().numpy()
    right = (outcome.right.int() - site.whole.right.int()).double().cpu().numpy()
    rows = site.clean.rows.cpu().numpy()
    roles = site.batch.roles[site.clean.rows, site.clean.positions].cpu().numpy()
    parts = {"": np.ones(len(rows), dtype=bool)}
    parts |= {role: roles == i for i, role in enumerate(role_names) if (roles == i).any()}

    def mean(values: np.ndarray, part: np.ndarray) -> tuple[float, tuple[float, float]]:
        # A row's sum and number stand for its positions: rows are resampled whole.
        sums = np.bincount(rows[part], values[part])
        sizes = np.bincount(rows[part])
        by_row = np.stack([sums, sizes], axis=1)[sizes > 0]
        interval = bootstrap(by_row, rng, statistic=lambda fig: np.divide(*fig.sum(0)))
        return float(values[part].mean()), interval

    return {name: Change(*mean(loss, part), *mean(right, part)) for name, part in parts.items()}
