"""What the mask of a head does to the pairs that a row stores."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from analysis.links import find_pairs
from analysis.statistics.estimates import Estimate, estimate_ratio
from tasks.base import Batch

MOVES = 0.001
"""The least share of its attention that a mask must move to count as doing anything."""


@dataclass(frozen=True)
class StoredPairs:
    """What a mask does to stored pairs, at the scored queries.

    Attributes:
        precision: share of the kept keys that are stored; chance: the share of all keys that are.
        recall: share of the stored keys that are kept; chance: the share of all keys kept.
        auroc: P(bias of a stored key > bias of another), ties count half; chance ½.
        hidden: share of the queries whose answer's value is masked; chance: the share of keys.
        lost_answer: share of the lost mass that lay on the answer's value; chance: A⁰'s share.
        lost_unstored: the same for the keys that no pair stored.
        answer: attention on the answer's value; chance: the same without the mask, A⁰.
        gained: their difference; chance 0.
        key: attention of stored values on their own key, the edge that binds a pair; chance: the
            same without the mask.
        key_gained: their difference; chance 0.
        key_uniform: the attention on that key if it were the same on all keys up to the value.
    """

    precision: Estimate
    recall: Estimate
    auroc: Estimate
    hidden: Estimate
    lost_answer: Estimate
    lost_unstored: Estimate
    answer: Estimate
    gained: Estimate
    key: Estimate
    key_gained: Estimate
    key_uniform: float

    @property
    def unbinds(self) -> bool:
        """Whether values lose attention to a key that without the mask gets more than evenly."""
        return self.key.chance > self.key_uniform and self.key_gained.high < -MOVES


def measure_stored_pairs(
    bias: Float[Tensor, "b t"],
    kept: Int[Tensor, "b t"],
    eligible: Int[Tensor, "b t"],
    stored: Bool[Tensor, "b t"],
    sums: dict[str, Float[Tensor, " b"]],
    asked: Float[Tensor, " b"],
    storing: Float[Tensor, " b"],
    rng: np.random.Generator,
) -> StoredPairs:
    """Compare one head's kept keys, and the attention its mask moves, with the stored pairs.

    Args:
        bias: of each key.
        kept: number of scored queries for which the key is kept.
        eligible: number of scored queries at or after the key.
        stored: whether the key belongs to a pair.
        sums: of attention over each row's queries, as `attention.sum_attention` names them.
        asked: scored queries per row.
        storing: stored values per row.
        rng: draws the resampled rows.
    """
    right, pairs = (kept * stored).sum(1), (eligible * stored).sum(1)
    base, share = (float(n.sum().double() / eligible.sum()) for n in (pairs, kept))
    ranked = auroc(bias, eligible * stored, eligible * ~stored)
    free_answer, free_unstored = (
        float(sums[name].sum() / asked.sum()) for name in ("free_answer", "free_unstored")
    )
    return StoredPairs(
        precision=estimate_ratio(right, kept.sum(1), base, rng),
        recall=estimate_ratio(right, pairs, share, rng),
        auroc=estimate_ratio(ranked, torch.ones_like(ranked), 0.5, rng),
        hidden=estimate_ratio(sums["hidden_answer"], asked, 1 - share, rng),
        lost_answer=estimate_ratio(sums["lost_answer"], sums["lost"], free_answer, rng),
        lost_unstored=estimate_ratio(sums["lost_unstored"], sums["lost"], free_unstored, rng),
        answer=estimate_ratio(sums["answer"], asked, free_answer, rng),
        gained=estimate_ratio(sums["answer"] - sums["free_answer"], asked, 0.0, rng),
        key=estimate_ratio(
            sums["key"], storing, float(sums["free_key"].sum() / storing.sum()), rng
        ),
        key_gained=estimate_ratio(sums["key"] - sums["free_key"], storing, 0.0, rng),
        key_uniform=float(sums["uniform_key"].sum() / storing.sum()),
    )


def auroc(
    values: Float[Tensor, "*b n"],
    positive: Shaped[Tensor, "*b n"],
    negative: Shaped[Tensor, "*b n"],
) -> Float[Tensor, "*b"]:
    """Return P(value of a positive > value of a negative) + ½ P(equal), for weighted items.

    Args:
        values: by which the items are ranked.
        positive: weights ≥ 0 of the items as positives.
        negative: weights ≥ 0 as negatives. The result is NaN where either sum is zero.
    """
    exact = values.double().contiguous()
    ranked, order = exact.sort(dim=-1)
    weight = torch.nn.functional.pad(negative.double().gather(-1, order).cumsum(-1), (1, 0))
    below = weight.gather(-1, torch.searchsorted(ranked, exact))
    upto = weight.gather(-1, torch.searchsorted(ranked, exact, right=True))
    wins = (positive * (below + upto) / 2).sum(-1)
    return wins / (positive.sum(-1) * negative.sum(-1))


def locate_answers(batch: Batch) -> Int[Tensor, "b t"]:
    """Return the position of the value that each position asks for; −1 where it asks for none."""
    query, _, value = find_pairs(batch)
    return _locate(batch, query, value)


def locate_keys(batch: Batch) -> Int[Tensor, "b t"]:
    """Return the position of the key of each stored value; −1 where no value is stored."""
    _, key, value = find_pairs(batch)
    return _locate(batch, value, key)


def _locate(batch: Batch, from_: Int[Tensor, "b n"], to: Int[Tensor, "b n"]) -> Int[Tensor, "b t"]:
    seq_len = batch.inputs.shape[1]
    # Padding, −1, goes to an extra column that is cut off.
    at = torch.full((len(to), seq_len + 1), -1, device=to.device)
    return at.scatter_(1, from_ % (seq_len + 1), to)[:, :seq_len]
