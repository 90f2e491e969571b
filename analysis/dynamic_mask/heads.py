"""What the mask of each head does: whom it keeps, what attention loses by it, whether for good."""

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from analysis.dynamic_mask.masking import Seen, answers_at, auroc, keys_at, readers
from analysis.links import has_pairs
from analysis.statistics.estimates import Estimate, divide_sums, estimate_ratio
from lab.models.evaluation import find_stored_positions
from lab.ops.attention_kernels import repeat_heads
from tasks.base import IGNORE, Batch

MOVES = 0.001
"""The share of its attention that a mask must move to do anything."""


@dataclass(frozen=True)
class Pairs:
    """What a mask does to stored pairs, as queries that are scored see it.

    Attributes:
        precision: share of the kept keys that are stored; by chance the share of all keys that are.
        recall: share of the stored keys that are kept; by chance the share of all keys kept.
        auroc: P(bias of a stored key > bias of another), ties half; chance ½.
        hidden: share of the queries whose answer's value is masked; by chance the share of keys.
        lost_answer: share of the lost mass that lay on the answer's value; by chance A⁰'s share.
        lost_unstored: likewise on keys that no pair stored.
        answer: attention on the answer's value; as chance what it is without the mask, A⁰.
        gained: their difference; chance 0.
        key: attention of stored values on their own key, the edge by which pairs are bound; as
            chance what it is without the mask.
        key_gained: their difference; chance 0.
        key_uniform: the attention on that key were all keys before a value given the same.
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
        """Whether values lose their key, which without the mask they attend to more than evenly."""
        return self.key.chance > self.key_uniform and self.key_gained.high < -MOVES


@dataclass(frozen=True)
class Head:
    """What the mask of one head of keys does; shares of (query, causally eligible key) pairs.

    Attributes:
        layer: index of the block.
        head: of keys and values.
        n_heads: how many the layer has.
        reading: the mask's name.
        window: keys that a query keeps; None for all.
        lightest: the least weight, beside the most favoured key's, that the bias leaves any key.
        kept: share of the eligible keys that are not masked, over all queries.
        kept_by_role: likewise, by the key's role; NaN for a role that no key has.
        kept_by_band: likewise, by role and band of the key's position, equal bands of the length.
        weight_by_role: mean weight e^(b − max b) beside the query's most favoured key, all windows
            apart, by the key's role; likewise.
        lost: share Σ_masked A⁰ of a scored query's attention without mask that lies on keys the
            mask takes; by chance the share of keys it takes.
        moved: total variation ½ Σ|A − A⁰| of a scored query's attention.
        pairs: None for a task that stores none.
    """

    layer: int
    head: int
    n_heads: int
    reading: str
    window: int | None
    lightest: float
    kept: float
    kept_by_role: Float[np.ndarray, " roles"]
    kept_by_band: Float[np.ndarray, "roles bands"]
    weight_by_role: Float[np.ndarray, " roles"]
    lost: Estimate
    moved: float
    pairs: Pairs | None

    @property
    def name(self) -> str:
        """The layer, and the head where there are several."""
        return head_name(self.layer, self.head, self.n_heads)

    @property
    def verdict(self) -> str:
        """What the mask takes: "noise", "answers", "keys", "both", "neither" or "nothing".

        It takes noise where the answers' values have more attention with the mask than without it,
        answers where they have less, both where they have more but some are masked; keys where
        values lose theirs, whatever the answers gain; "undecided" where that is not clear.
        """
        unbinds = self.pairs is not None and self.pairs.unbinds
        if self.moved < MOVES and not unbinds:
            return "nothing"
        if self.pairs is None:
            return "undecided"
        gained = self.pairs.gained
        if unbinds and gained.high >= -MOVES:
            return "keys"
        if -MOVES < gained.low <= gained.high < MOVES:
            return "neither"
        if gained.high < 0:
            return "answers"
        if gained.low > 0:
            return "both" if self.pairs.hidden.value > MOVES else "noise"
        return "undecided"


def head_name(layer: int, head: int, n_heads: int) -> str:
    """Return what a head of keys is called."""
    return f"layer {layer}" + (f", head {head}" if n_heads > 1 else "")


@torch.no_grad()
def heads(
    seen: Seen, batch: Batch, n_roles: int, n_bands: int, rng: np.random.Generator
) -> list[Head]:
    """Measure what the mask of each of a layer's heads does on a batch."""
    asking = batch.targets != IGNORE
    asked = asking.sum(1).double()
    stored = find_stored_positions(batch) if has_pairs(batch) else None
    edges = {"answer": (answers_at(batch), asking)} if has_pairs(batch) else {}
    if has_pairs(batch):
        keys = keys_at(batch)
        edges["key"] = keys, keys >= 0
    kept, eligible = readers(seen.onset, asking)
    sums = _attention_sums(seen, asking, stored, edges)
    kept_of_all, eligible_of_all = readers(seen.onset, torch.ones_like(asking))
    by_band = _shares(kept_of_all, eligible_of_all, batch.roles, n_roles, n_bands)
    by_role = _shares(kept_of_all, eligible_of_all, batch.roles, n_roles, 1)[..., 0]
    overall = kept_of_all.sum((0, 2)).double() / eligible_of_all.sum()
    weights = _shares(_weights(seen.bias), eligible_of_all, batch.roles, n_roles, 1)[..., 0]
    bias = seen.bias.double()
    lightest = (bias - bias.amax(-1, keepdim=True)).amin((0, 2)).exp().tolist()
    found = []
    for head in range(len(lightest)):
        of_head = {name: total[:, head] for name, total in sums.items()}
        taken = 1 - float(kept[:, head].sum().double() / eligible.sum())
        pairs = None
        if stored is not None:
            counts = (kept[:, head], eligible, stored)
            storing = edges["key"][1].sum(1).double()
            pairs = _pairs(bias[:, head], *counts, of_head, asked, storing, rng)
        found.append(
            Head(
                layer=seen.layer,
                head=head,
                n_heads=len(lightest),
                reading=seen.reading,
                window=seen.module.window,
                lightest=lightest[head],
                kept=float(overall[head]),
                kept_by_role=by_role[head],
                kept_by_band=by_band[head],
                weight_by_role=weights[head],
                lost=estimate_ratio(of_head["lost"], asked, taken, rng),
                moved=divide_sums(torch.stack([of_head["moved"], asked], 1).cpu().numpy()),
                pairs=pairs,
            )
        )
    return found


def _pairs(
    bias: Float[Tensor, "b t"],
    kept: Int[Tensor, "b t"],
    eligible: Int[Tensor, "b t"],
    stored: Bool[Tensor, "b t"],
    sums: dict[str, Float[Tensor, " b"]],
    asked: Float[Tensor, " b"],
    storing: Float[Tensor, " b"],
    rng: np.random.Generator,
) -> Pairs:
    """Hold one head's kept keys, and what its attention lost, against the stored pairs."""
    right, pairs = (kept * stored).sum(1), (eligible * stored).sum(1)
    base, share = (float(n.sum().double() / eligible.sum()) for n in (pairs, kept))
    ranked = auroc(bias, eligible * stored, eligible * ~stored)
    free_answer, free_unstored = (
        float(sums[name].sum() / asked.sum()) for name in ("free_answer", "free_unstored")
    )
    return Pairs(
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


def _attention_sums(
    seen: Seen,
    asking: Bool[Tensor, "b t"],
    stored: Bool[Tensor, "b t"] | None,
    edges: dict[str, tuple[Int[Tensor, "b t"], Bool[Tensor, "b t"]]],
) -> dict[str, Float[Tensor, "b h_kv"]]:
    """Sum over each row's queries, by key head, what the mask takes, moves and leaves.

    Args:
        seen: a layer.
        asking: the scored queries.
        stored: the keys that hold pairs; None where there are none.
        edges: by name, the key that each position should read, and the positions that count.
    """
    n_heads, n_kv_heads = seen.module.n_heads, seen.module.n_kv_heads
    sums: dict[str, Tensor] = {}
    position = torch.arange(asking.shape[1], device=asking.device)
    everyone = torch.stack([asking, *(of for _, of in edges.values())]).any(0)
    for some, at, pattern, free in seen.patterns(everyone):
        masked = repeat_heads(seen.onset[some, :, None, : at.stop] <= position[at, None], n_heads)
        lost = free * masked
        of = {"lost": lost.sum(-1), "moved": (pattern - free).abs().sum(-1) / 2}
        if stored is not None:
            unstored = ~stored[some, None, None, : at.stop]
            of["lost_unstored"] = (lost * unstored).sum(-1)
            of["free_unstored"] = (free * unstored).sum(-1)
        counts = dict.fromkeys(of, asking)
        for name, (source, targets) in edges.items():
            place = source[some, None, at, None].clamp(min=0).expand(*free.shape[:3], 1)
            on = {"": pattern, "free_": free, "lost_": lost, "hidden_": masked.to(free.dtype)}
            on["uniform_"] = (free > -1) / (position[at, None] + 1.0)
            of |= {what + name: edge.gather(-1, place)[..., 0] for what, edge in on.items()}
            counts |= {what + name: targets for what in on}
        for name, measured in of.items():
            total = (measured * counts[name][some, None, at]).double().sum(-1)
            known = sums.setdefault(name, total.new_zeros(len(asking), n_kv_heads))
            known[some] += reduce(total, "b (h g) -> b h", "mean", h=n_kv_heads)
    return sums


def _weights(bias: Float[Tensor, "b h t"]) -> Float[Tensor, "b h t"]:
    """Sum over its queries each key's weight e^(b_s − max b) beside their most favoured key."""
    bias = bias.double()
    best = bias.cummax(-1).values
    later = (-best).flip(-1).logcumsumexp(-1).flip(-1)
    return (bias + later).exp()


def _shares(
    part: Shaped[Tensor, "b h t"],
    whole: Int[Tensor, "b t"],
    roles: Int[Tensor, "b t"],
    n_roles: int,
    n_bands: int,
) -> Float[np.ndarray, "h roles bands"]:
    """Return Σ part / Σ whole over the keys of each role and band of positions; NaN where none."""
    n_heads, seq_len = part.shape[1:]
    band = torch.arange(seq_len, device=part.device) * n_bands // seq_len
    group = roles * n_bands + band
    counts = torch.cat([part.double(), whole[:, None].double()], 1)
    sums = counts.new_zeros(n_heads + 1, n_roles * n_bands)
    sums.index_add_(1, group.flatten(), rearrange(counts, "b h t -> h (b t)"))
    table = rearrange(sums, "h (r n) -> h r n", n=n_bands).cpu().numpy()
    with np.errstate(invalid="ignore"):
        return table[:-1] / table[-1:]
