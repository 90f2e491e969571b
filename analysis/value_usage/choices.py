"""Which values the tokens of inner function attention choose, how surely, and since when."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.statistics.distributions import (
    effective_number,
    entropy,
    gini,
    joint_counts,
    kl_to_uniform,
    miller_madow,
    mutual_information,
    permutation_null,
)
from analysis.statistics.estimates import thin
from analysis.statistics.intervals import bootstrap
from lab.hooks import HookPoint
from lab.layers.inner_function import InnerFunctionAttention
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.training.runs import Run
from tasks.base import Batch

BANDS = 8
"""Equal bands of positions that a choice may depend on."""
SHUFFLES = 100
"""Shuffles behind what chance makes of a mutual information."""
HISTORY_TOKENS = 2**11
"""Tokens whose choices are followed over training."""
STEPS = 24
"""Most steps of a run at which they are."""


@dataclass(frozen=True)
class Choices:
    """What a layer's tokens choose.

    Attributes:
        indices: the k values of each token.
        scores: of all values.
    """

    indices: Int[np.ndarray, "b t k"]
    scores: Float[np.ndarray, "b t n_v"]


@dataclass(frozen=True)
class Dependence:
    """What a label of tokens says about the values they choose.

    Attributes:
        information: I(value; label), plug-in, nats.
        corrected: likewise, by Miller and Madow; may be below 0.
        null: mean of I under shuffled labels.
        null_high: its 95 % quantile.
        bound: min(H(label), H(value)), nats: I is no larger, whoever tells the other.
    """

    information: float
    corrected: float
    null: float
    null_high: float
    bound: float

    @property
    def shows(self) -> bool:
        """Whether I is above what shuffled labels have."""
        return self.information > self.null_high


@dataclass(frozen=True)
class Usage:
    """How a layer uses its values.

    Attributes:
        layer: index of the block.
        retrieval: how chosen rows are weighted.
        k: values a token takes.
        shares: share of tokens that choose each value, in [0, 1]; Σ = k.
        by_role: likewise among the tokens of a role; NaN for a role that is not there.
        used: how many values any token chooses.
        effective: e^H of the load, 1 … n_v.
        kl: of the load to uniform, nats; 0 … log n_v.
        gini: of the load, 0 (uniform) … 1 − 1/n_v.
        role: what a token's role says about its values.
        band: what its band of positions does.
        margins: 5, 25, 50, 75 and 95 % quantiles of the k-th score less the next; NaN for k = n_v.
        ties: share of tokens whose margin is exactly 0: the lower index is chosen.
    """

    layer: int
    retrieval: str
    k: int
    shares: Float[np.ndarray, " n_v"]
    by_role: Float[np.ndarray, "roles n_v"]
    used: int
    effective: float
    kl: float
    gini: float
    role: Dependence
    band: Dependence
    margins: Float[np.ndarray, " 5"]
    ties: float


@dataclass(frozen=True)
class Past:
    """A layer's choices over training, on a few fixed rows.

    Attributes:
        layer: index of the block.
        steps: of the run, from 0.
        shares: share of tokens that choose each value.
        used: values that any of them chooses.
        effective: e^H of the load.
        ties: share of tokens with a tie at the last place.
        churn: share of tokens whose set of values is another than at the step before; NaN at first.
        churn_interval: its 95 % interval, by resampling rows; NaN for fewer than two.
        churn_dealt: what it would be were the step's choices dealt out among the tokens at random.
        zero_keys: whether all keys are zero at the first step.
    """

    layer: int
    steps: Int[np.ndarray, " steps"]
    shares: Float[np.ndarray, "steps n_v"]
    used: Int[np.ndarray, " steps"]
    effective: Float[np.ndarray, " steps"]
    ties: Float[np.ndarray, " steps"]
    churn: Float[np.ndarray, " steps"]
    churn_interval: Float[np.ndarray, "steps 2"]
    churn_dealt: Float[np.ndarray, " steps"]
    zero_keys: bool


def value_layers(model: LanguageModel) -> dict[int, InnerFunctionAttention]:
    """Return the layers whose values are looked up, by block."""
    mixers = {i: getattr(block, "mixer", None) for i, block in enumerate(model.blocks)}
    return {i: m for i, m in mixers.items() if isinstance(m, InnerFunctionAttention)}


@torch.no_grad()
def choices(model: LanguageModel, batch: Batch) -> dict[int, Choices]:
    """Return what the tokens of a batch choose, by block."""
    met: dict[str, np.ndarray] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        met[point.name] = tensor.cpu().numpy()

    layers = value_layers(model)
    points = ("hook_value_indices", "hook_value_scores")
    names = [f"blocks.{i}.mixer.{point}" for i in layers for point in points]
    with model.hooks([(names, keep)]):
        score(model, batch, "fp32")
    return {i: Choices(*(met[f"blocks.{i}.mixer.{point}"] for point in points)) for i in layers}


def usage(
    layer: int,
    module: InnerFunctionAttention,
    chosen: Choices,
    roles: Int[np.ndarray, "b t"],
    n_roles: int,
    rng: np.random.Generator,
) -> Usage:
    """Measure how a layer uses its values."""
    n_values = chosen.scores.shape[-1]
    shares = loads(chosen.indices, n_values)
    by_role = np.stack([loads(chosen.indices[roles == role], n_values) for role in range(n_roles)])
    flat = chosen.indices.reshape(-1, chosen.indices.shape[-1])
    seq_len = roles.shape[1]
    band = np.broadcast_to(np.arange(seq_len) * BANDS // seq_len, roles.shape)
    gaps = margins(chosen)
    return Usage(
        layer=layer,
        retrieval=module.retrieval,
        k=module.n_chosen,
        shares=shares,
        by_role=by_role,
        used=int((shares > 0).sum()),
        effective=float(effective_number(shares)),
        kl=float(kl_to_uniform(shares)),
        gini=float(gini(shares)),
        role=dependence(flat, roles.ravel(), rng),
        band=dependence(flat, band.ravel(), rng),
        margins=np.quantile(gaps, [0.05, 0.25, 0.5, 0.75, 0.95])
        if gaps.size
        else np.full(5, np.nan),
        ties=float((gaps == 0).mean()) if gaps.size else 0.0,
    )


def loads(indices: Int[np.ndarray, "*b k"], n_values: int) -> Float[np.ndarray, " n_v"]:
    """Return the share of tokens that choose each value; NaN where there is no token."""
    tokens = indices.size // indices.shape[-1]
    if not tokens:
        return np.full(n_values, np.nan)
    return np.bincount(indices.ravel(), minlength=n_values) / tokens


def margins(chosen: Choices) -> Float[np.ndarray, " n"]:
    """Return the k-th highest score of each token less the next; nothing where all are chosen."""
    k = chosen.indices.shape[-1]
    if k == chosen.scores.shape[-1]:
        return np.zeros(0, chosen.scores.dtype)
    ranked = -np.sort(-chosen.scores.reshape(-1, chosen.scores.shape[-1]), axis=-1)
    return ranked[:, k - 1] - ranked[:, k]


def dependence(
    chosen: Int[np.ndarray, "n k"], labels: Int[np.ndarray, " n"], rng: np.random.Generator
) -> Dependence:
    """Measure what a label of tokens says about the values they choose."""
    counts = joint_counts(chosen, labels)
    null = permutation_null(chosen, labels, rng, SHUFFLES)
    return Dependence(
        information=mutual_information(counts),
        corrected=miller_madow(counts),
        null=float(null.mean()),
        null_high=float(np.quantile(null, 0.95)),
        bound=min(float(entropy(counts.sum(side))) for side in (0, 1)),
    )


def churn(before: Int[np.ndarray, "*b k"], after: Int[np.ndarray, "*b k"]) -> float:
    """Return the share of tokens that choose another set of values than before."""
    return float(changed(before, after).mean())


def changed(
    before: Int[np.ndarray, "*b k"], after: Int[np.ndarray, "*b k"]
) -> Bool[np.ndarray, "*b"]:
    """Return which tokens choose another set of values than before."""
    return (np.sort(before, -1) != np.sort(after, -1)).any(-1)


def churn_if_dealt(before: Int[np.ndarray, "*b k"], after: Int[np.ndarray, "*b k"]) -> float:
    """Return the churn were the later choices dealt out among the tokens at random, on average.

        1 − Σ_s p_before(s) p_after(s)

    with p the share of tokens that choose the set s.
    """
    k, tokens = before.shape[-1], before.size // before.shape[-1]
    sets = np.concatenate([np.sort(z, -1).reshape(-1, k) for z in (before, after)])
    kinds, index = np.unique(sets, axis=0, return_inverse=True)
    then, now = (np.bincount(part, minlength=len(kinds)) for part in np.split(index.ravel(), 2))
    return float(1 - then @ now / tokens**2)


def history(run: Run, batch: Batch, rng: np.random.Generator) -> list[Past]:
    """Follow what tokens of the batch's first rows choose, over the steps of a run."""
    steps = thin(run.list_steps(), STEPS)
    rows = batch[: max(1, HISTORY_TOKENS // batch.inputs.shape[1])].to("cpu")
    met: list[dict[int, Choices]] = []
    zero: dict[int, bool] = {}
    for step in steps:
        model = run.load_model(step)
        met.append(choices(model, rows))
        layers = value_layers(model)
        zero = zero or {i: not layer.value_keys.any().item() for i, layer in layers.items()}
    return [_past(layer, steps, [at[layer] for at in met], zero[layer], rng) for layer in zero]


def _past(
    layer: int,
    steps: Sequence[int],
    met: Sequence[Choices],
    zero_keys: bool,
    rng: np.random.Generator,
) -> Past:
    shares = np.stack([loads(at.indices, at.scores.shape[-1]) for at in met])
    moves = [(old.indices, new.indices) for old, new in pairwise(met)]
    of_rows = [changed(*move).mean(-1) for move in moves]
    unknown = (math.nan, math.nan)
    gaps = [margins(at) for at in met]
    return Past(
        layer=layer,
        steps=np.array(steps),
        shares=shares,
        used=(shares > 0).sum(-1),
        effective=effective_number(shares),
        ties=np.array([float((gap == 0).mean()) if gap.size else 0.0 for gap in gaps]),
        churn=np.array([math.nan, *(float(rows.mean()) for rows in of_rows)]),
        churn_interval=np.array([unknown, *(bootstrap(rows, rng) for rows in of_rows)]),
        churn_dealt=np.array([math.nan, *(churn_if_dealt(*move) for move in moves)]),
        zero_keys=zero_keys,
    )
