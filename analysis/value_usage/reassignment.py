"""Give tokens other values than they chose, at the weights of those they chose."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.base import Subject
from analysis.scoring import Scored, scored
from analysis.value_usage.choices import find_value_layers, measure_churn
from lab.hooks import HookPoint
from tasks.base import Batch

Reassign = Callable[[Int[Tensor, "b t k"]], Int[Tensor, "b t k"]]
"""From the values that tokens choose to those that they get."""


def force_value(value: int, there: Bool[Tensor, "b t"]) -> Reassign:
    """Force a value on some tokens: it replaces the last choice of those that lack it."""

    def reassign(indices: Int[Tensor, "b t k"]) -> Int[Tensor, "b t k"]:
        missing = there & (indices != value).all(-1)
        after = indices.clone()
        after[..., -1] = torch.where(missing, value, indices[..., -1])
        return after

    return reassign


def shuffle_choices(seed: int) -> Reassign:
    """Shuffle the choices among all tokens, so that each value is chosen as often as before."""

    def reassign(indices: Int[Tensor, "b t k"]) -> Int[Tensor, "b t k"]:
        flat = indices.flatten(0, 1)
        order = np.random.default_rng(seed).permutation(len(flat))
        return flat[torch.from_numpy(order).to(flat.device)].view_as(indices)

    return reassign


def reorder_scores(
    scores: Float[Tensor, "b t n_v"], after: Int[Tensor, "b t k"]
) -> Float[Tensor, "b t n_v"]:
    """Permute each token's own scores so that the values `after` have the highest, in their order.

    A value's weight comes from its score, which is low where it was not chosen. Taking over the
    score of the value it replaces, a swap shows the effect of the value and not of a low weight.
    """
    ranked = scores.argsort(dim=-1, descending=True, stable=True)
    taken = (ranked[..., :, None] == after[..., None, :]).any(-1)
    others = taken.int().argsort(dim=-1, stable=True)[..., : scores.shape[-1] - after.shape[-1]]
    order = torch.cat([after, ranked.gather(-1, others)], -1)
    return torch.empty_like(scores).scatter_(-1, order, scores.gather(-1, ranked))


def score_reassigned(
    subject: Subject, batch: Batch, layer: int, reassign: Reassign
) -> tuple[Scored, float]:
    """Return the answers with a layer's values reassigned, and the share of tokens affected."""
    name = f"blocks.{layer}.mixer.hook_value"
    k = find_value_layers(subject.model)[layer].n_chosen
    given: list[Tensor] = []
    moved: list[float] = []

    def change_scores(scores: Tensor, point: HookPoint) -> Tensor:
        own = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
        given.append(reassign(own))
        moved.append(measure_churn(own.cpu().numpy(), given[-1].cpu().numpy()))
        return reorder_scores(scores, given[-1])

    def change_indices(indices: Tensor, point: HookPoint) -> Tensor:
        # Of tied scores the layer would choose the lower index.
        return given[-1]

    hooks = [(f"{name}_scores", change_scores), (f"{name}_indices", change_indices)]
    with subject.model.hooks(hooks):
        return scored(subject.model, batch), moved[-1]
