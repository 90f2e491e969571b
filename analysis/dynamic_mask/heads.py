"""What the mask of each head does: which keys it keeps, and which attention it removes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from analysis.dynamic_mask.attention import average_by_role_and_band, sum_attention, sum_weights
from analysis.dynamic_mask.layers import MaskedLayer, name_mask
from analysis.dynamic_mask.masking import count_readers
from analysis.dynamic_mask.stored_pairs import (
    MOVES,
    StoredPairs,
    locate_answers,
    locate_keys,
    measure_stored_pairs,
)
from analysis.links import has_pairs
from analysis.statistics.estimates import Estimate, divide_sums, estimate_ratio
from analysis.words import name_head
from lab.models.evaluation import find_stored_positions
from tasks.base import IGNORE, Batch

NAMED = 3
"""Maximum number of heads that a sentence names."""


@dataclass(frozen=True)
class MaskedHead:
    """What the mask of one key head does; shares are of pairs of a query and an eligible key.

    Attributes:
        layer: index of the block.
        head: of keys and values.
        n_heads: number of key heads of the layer.
        reading: the mask's name.
        window: number of keys that a query keeps; None for all.
        lightest: the least weight, relative to the most favoured key's, that the bias leaves a key.
        kept: share of the eligible keys that are not masked, over all queries.
        kept_by_role: the same by the key's role; NaN for a role that no key has.
        kept_by_band: the same by role and by band of positions, equal bands of the row.
        weight_by_role: mean weight e^(b − max b) relative to the query's most favoured key, window
            ignored, by the key's role; NaN for a role that no key has.
        lost: share Σ_masked A⁰ of a scored query's attention that without the mask lies on keys
            that the mask removes; chance: the share of keys that it removes.
        moved: total variation ½ Σ|A − A⁰| of a scored query's attention.
        pairs: None for a task without stored pairs.
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
    pairs: StoredPairs | None

    @property
    def name(self) -> str:
        """The layer, and the head if the layer has several."""
        return name_key_head(self.layer, self.head, self.n_heads)

    @property
    def removed(self) -> str:
        """What the mask removes, in a word.

        "noise" if the answers' values get more attention with the mask than without it, "answers"
        if they get less, "both" if they get more but some are masked, "neither" if the attention
        on them stays. "keys" if values lose their own key, unless answers clearly lose as well.
        "nothing" if it moves next to no attention, "undecided" if the intervals do not tell.
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


def name_key_head(layer: int, head: int, n_heads: int) -> str:
    """Name a key head, by its layer alone if that has no other."""
    return f"layer {layer}" if n_heads == 1 else name_head(layer, head)


def pick_most(heads: Sequence[MaskedHead], key: Callable[[MaskedHead], float]) -> list[MaskedHead]:
    """Return the `NAMED` heads with the largest keys, in their own order."""
    by_key = sorted(range(len(heads)), key=lambda i: key(heads[i]), reverse=True)
    return [heads[i] for i in sorted(by_key[:NAMED])]


@torch.no_grad()
def measure_heads(
    layer: MaskedLayer, batch: Batch, n_roles: int, n_bands: int, rng: np.random.Generator
) -> list[MaskedHead]:
    """Measure what the mask of each of a layer's key heads does on a batch."""
    asking = batch.targets != IGNORE
    asked = asking.sum(1).double()
    stored = find_stored_positions(batch) if has_pairs(batch) else None
    edges = {}
    if stored is not None:
        keys = locate_keys(batch)
        edges = {"answer": (locate_answers(batch), asking), "key": (keys, keys >= 0)}
    kept, eligible = count_readers(layer.onset, asking)
    sums = sum_attention(layer, asking, stored, edges)
    kept_of_all, eligible_of_all = count_readers(layer.onset, torch.ones_like(asking))
    weights = sum_weights(layer.bias)
    by_band, by_role, weight_by_role = (
        average_by_role_and_band(part, eligible_of_all, batch.roles, n_roles, bands)
        for part, bands in ((kept_of_all, n_bands), (kept_of_all, 1), (weights, 1))
    )
    overall = kept_of_all.sum((0, 2)).double() / eligible_of_all.sum()
    bias = layer.bias.double()
    lightest = (bias - bias.amax(-1, keepdim=True)).amin((0, 2)).exp().tolist()
    found = []
    for head in range(len(lightest)):
        of_head = {name: total[:, head] for name, total in sums.items()}
        removed = 1 - float(kept[:, head].sum().double() / eligible.sum())
        pairs = None
        if stored is not None:
            storing = edges["key"][1].sum(1).double()
            counts = (kept[:, head], eligible, stored)
            pairs = measure_stored_pairs(bias[:, head], *counts, of_head, asked, storing, rng)
        found.append(
            MaskedHead(
                layer=layer.layer,
                head=head,
                n_heads=len(lightest),
                reading=name_mask(layer.module),
                window=layer.module.window,
                lightest=lightest[head],
                kept=float(overall[head]),
                kept_by_role=by_role[head, :, 0],
                kept_by_band=by_band[head],
                weight_by_role=weight_by_role[head, :, 0],
                lost=estimate_ratio(of_head["lost"], asked, removed, rng),
                moved=divide_sums(torch.stack([of_head["moved"], asked], 1).cpu().numpy()),
                pairs=pairs,
            )
        )
    return found
