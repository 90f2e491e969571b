"""The values that tokens of inner function attention choose, and how their choices change."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lab.hooks import HookPoint
from lab.layers.inner_function import InnerFunctionAttention
from lab.models import LanguageModel
from lab.models.evaluation import score
from tasks.base import Batch

LAYERS = 4
"""Maximum number of layers that share a figure, and in which values are forced."""


@dataclass(frozen=True)
class ValueChoices:
    """What a layer's tokens choose.

    Attributes:
        indices: the k values of each token.
        scores: each token's scores of all values.
    """

    indices: Int[np.ndarray, "b t k"]
    scores: Float[np.ndarray, "b t n_v"]


def find_value_layers(model: LanguageModel) -> dict[int, InnerFunctionAttention]:
    """Return the layers whose tokens choose values, by block."""
    mixers = {i: getattr(block, "mixer", None) for i, block in enumerate(model.blocks)}
    return {i: m for i, m in mixers.items() if isinstance(m, InnerFunctionAttention)}


@torch.no_grad()
def record_choices(model: LanguageModel, batch: Batch) -> dict[int, ValueChoices]:
    """Run a model on a batch and return what the tokens choose, by block."""
    seen: dict[str, np.ndarray] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        seen[point.name] = tensor.cpu().numpy()

    layers = find_value_layers(model)
    points = ("hook_value_indices", "hook_value_scores")
    names = [f"blocks.{i}.mixer.{point}" for i in layers for point in points]
    with model.hooks([(names, keep)]):
        score(model, batch, "fp32")
    return {
        i: ValueChoices(*(seen[f"blocks.{i}.mixer.{point}"] for point in points)) for i in layers
    }


def measure_loads(indices: Int[np.ndarray, "*b k"], n_values: int) -> Float[np.ndarray, " n_v"]:
    """Return the share of tokens that choose each value; NaN without tokens."""
    tokens = indices.size // indices.shape[-1]
    if not tokens:
        return np.full(n_values, np.nan)
    return np.bincount(indices.ravel(), minlength=n_values) / tokens


def measure_margins(chosen: ValueChoices) -> Float[np.ndarray, " n"]:
    """Return each token's k-th highest score less the next; nothing if all values are chosen."""
    k = chosen.indices.shape[-1]
    if k == chosen.scores.shape[-1]:
        return np.zeros(0, chosen.scores.dtype)
    ranked = -np.sort(-chosen.scores.reshape(-1, chosen.scores.shape[-1]), axis=-1)
    return ranked[:, k - 1] - ranked[:, k]


def measure_ties(margins: Float[np.ndarray, " n"]) -> float:
    """Return the share of tokens whose margin is exactly 0."""
    return float((margins == 0).mean()) if margins.size else 0.0


def find_changed(
    before: Int[np.ndarray, "*b k"], after: Int[np.ndarray, "*b k"]
) -> Bool[np.ndarray, "*b"]:
    """Return which tokens choose another set of values than before."""
    return (np.sort(before, -1) != np.sort(after, -1)).any(-1)


def measure_churn(before: Int[np.ndarray, "*b k"], after: Int[np.ndarray, "*b k"]) -> float:
    """Return the share of tokens that choose another set of values than before."""
    return float(find_changed(before, after).mean())


def expect_churn(before: Int[np.ndarray, "*b k"], after: Int[np.ndarray, "*b k"]) -> float:
    """Return the mean churn if the later choices were shuffled among the tokens.

        1 − Σ_s p_before(s) p_after(s)

    with p the share of tokens that choose the set s.
    """
    k, tokens = before.shape[-1], before.size // before.shape[-1]
    sets = np.concatenate([np.sort(z, -1).reshape(-1, k) for z in (before, after)])
    kinds, index = np.unique(sets, axis=0, return_inverse=True)
    then, now = (np.bincount(part, minlength=len(kinds)) for part in np.split(index.ravel(), 2))
    return float(1 - then @ now / tokens**2)
