"""What the answers lose when a value is forced on tokens, or values are dealt out at random."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.base import Subject
from analysis.scoring import Scored, scored
from analysis.statistics.estimates import (
    Estimate,
    estimate_accuracy,
    estimate_ratio,
    sum_by_row,
    thin,
    westfall_young,
)
from analysis.value_usage.choices import churn, value_layers
from lab.hooks import HookPoint
from tasks.base import Batch

MOST = 5
"""Most values of a layer that are forced, those that are chosen most."""
LAYERS = 4
"""Most layers in which they are, from the first to the last."""
PASSES = 64
"""Most swaps in all, but for one value of each such layer."""
TOKENS = 2**18
"""Tokens that are answered again in all; each swap gets as many rows as that allows."""
FEWEST_ROWS = 4

Choose = Callable[[Int[Tensor, "b t k"]], Int[Tensor, "b t k"]]
"""From the values that tokens choose to those that they get."""


@dataclass(frozen=True)
class Swap:
    """What happens to the accuracy when tokens get other values, at the weights of their own.

    Attributes:
        layer: index of the block.
        value: the one that is forced; None where the tokens' own are dealt out at random.
        role: of the tokens it is forced on, index into role_names; None for all.
        moved: share of all tokens that get a value they had not chosen.
        change: accuracy after less accuracy before, in [−1, 1]; chance 0.
        p: that the worst of all these swaps costs as much where none costs anything.
    """

    layer: int
    value: int | None
    role: int | None
    moved: float
    change: Estimate
    p: float


@dataclass(frozen=True)
class Swaps:
    """Every swap, and the accuracy before.

    Attributes:
        accuracy: as it is; chance is the task's.
        swaps: by layer, value and role, the random one first.
        placebo: the largest change of a hidden state when tokens are forced to what they chose.
        role_names: the task's.
        forced: most values that are forced in a layer, those that are chosen most.
        left_out: whether there are more, or more layers.
    """

    accuracy: Estimate
    swaps: tuple[Swap, ...]
    placebo: float
    role_names: tuple[str, ...]
    forced: int
    left_out: bool


@torch.no_grad()
def measure_swaps(subject: Subject, loads: dict[int, Float[np.ndarray, " n_v"]]) -> Swaps:
    """Force each layer's most used values on all tokens, and on those of each role.

    Args:
        subject: what is looked at, on its first rows.
        loads: how many tokens choose each value, by layer.
    """
    layers = thin(list(loads), LAYERS)
    n_groups = 1 + len(subject.task.role_names)
    most = min(MOST, max(1, (PASSES // len(layers) - 2) // n_groups))
    passes = sum(2 + min(most, len(loads[layer])) * n_groups for layer in layers)
    seq_len = subject.batch.inputs.shape[1]
    batch = subject.batch[: max(FEWEST_ROWS, TOKENS // (passes * seq_len))]
    rng = np.random.default_rng(subject.seed)
    before = scored(subject.model, batch)
    roles = range(len(subject.task.role_names))
    groups: list[tuple[int | None, Bool[Tensor, "b t"]]] = [
        (None, torch.ones_like(batch.roles, dtype=torch.bool))
    ]
    groups += [(role, there) for role in roles if (there := batch.roles == role).any()]
    found, changes, placebo = [], [], 0.0
    for layer in layers:

        def answer(choose: Choose, layer: int = layer) -> tuple[Scored, float]:
            return _answer(subject, batch, layer, choose)

        same, _ = answer(torch.clone)
        placebo = max(placebo, float((same.hidden - before.hidden).abs().max()))
        tries: list[tuple[int | None, int | None, Choose]] = [(None, None, dealt(subject.seed))]
        for value in np.argsort(-loads[layer], kind="stable")[:most].tolist():
            tries += [(value, role, forced(value, there)) for role, there in groups]
        for value, role, choose in tries:
            after, moved = answer(choose)
            change = after.right.double() - before.right.double()
            sums, counts = sum_by_row(before, change)
            estimate = estimate_ratio(sums, counts, 0.0, rng)
            found.append(Swap(layer, value, role, moved, estimate, math.nan))
            changes.append(sums.cpu().numpy())
    ps = westfall_young(np.stack(changes, 1), rng).tolist()
    swaps = [replace(swap, p=p) for swap, p in zip(found, ps, strict=True)]
    return Swaps(
        accuracy=estimate_accuracy(before, subject.task.chance, rng),
        swaps=tuple(swaps),
        placebo=placebo,
        role_names=subject.task.role_names,
        forced=most,
        left_out=len(loads) > len(layers) or max(map(len, loads.values())) > most,
    )


def forced(value: int, there: Bool[Tensor, "b t"]) -> Choose:
    """Return how some tokens get a value: in place of their last choice, where it is missing."""

    def choose(indices: Int[Tensor, "b t k"]) -> Int[Tensor, "b t k"]:
        missing = there & (indices != value).all(-1)
        after = indices.clone()
        after[..., -1] = torch.where(missing, value, indices[..., -1])
        return after

    return choose


def dealt(seed: int) -> Choose:
    """Return how all tokens' choices are dealt out among them at random, as often as before."""

    def choose(indices: Int[Tensor, "b t k"]) -> Int[Tensor, "b t k"]:
        flat = indices.flatten(0, 1)
        order = np.random.default_rng(seed).permutation(len(flat))
        return flat[torch.from_numpy(order).to(flat.device)].view_as(indices)

    return choose


def handed_on(
    scores: Float[Tensor, "b t n_v"], after: Int[Tensor, "b t k"]
) -> Float[Tensor, "b t n_v"]:
    """Return each token's own scores dealt anew: `after` gets the highest, in its order.

    A value has the weight that its score gives it, small where it was not chosen. So that a swap
    tells of the value and not of a small weight, it takes over the score of the one it replaces.
    """
    ranked = scores.argsort(dim=-1, descending=True, stable=True)
    taken = (ranked[..., :, None] == after[..., None, :]).any(-1)
    others = taken.int().argsort(dim=-1, stable=True)[..., : scores.shape[-1] - after.shape[-1]]
    order = torch.cat([after, ranked.gather(-1, others)], -1)
    return torch.empty_like(scores).scatter_(-1, order, scores.gather(-1, ranked))


def _answer(subject: Subject, batch: Batch, layer: int, choose: Choose) -> tuple[Scored, float]:
    """Return the answers with other choices, and the share of tokens whose set of values moved."""
    name = f"blocks.{layer}.mixer.hook_value"
    k = value_layers(subject.model)[layer].n_chosen
    given: list[Tensor] = []
    moved: list[float] = []

    def score_anew(scores: Tensor, point: HookPoint) -> Tensor:
        own = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
        given.append(choose(own))
        moved.append(churn(own.cpu().numpy(), given[-1].cpu().numpy()))
        return handed_on(scores, given[-1])

    def choose_anew(indices: Tensor, point: HookPoint) -> Tensor:
        # Of tied scores the layer would take the lower index.
        return given[-1]

    with subject.model.hooks([(f"{name}_scores", score_anew), (f"{name}_indices", choose_anew)]):
        return scored(subject.model, batch), moved[-1]
