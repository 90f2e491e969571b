"""How evenly a layer's experts are used, next to uniform random choice."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from analysis.experts.choices import ExpertChoices
from analysis.experts.spread import (
    STANDING,
    Spread,
    bound_standing,
    choose_ranks,
    count_fewest,
    draw_uniform,
    expect_overlap,
    measure_spread,
    rank_loads,
)
from analysis.plain import figure_only

PAIR_ENTRIES = 2**24
"""About how many pairs of chosen experts are compared for the overlap of heads, at most."""


@dataclass(frozen=True)
class Ranked:
    """Loads by rank, in multiples of the mean load of all experts.

    Attributes:
        ranks: from 1, evenly spaced in the logarithm.
        choices: of the expert at this rank by choices; 0 for unused experts.
        weighted: of the expert at this rank by |weight|.
        low: 2.5 % quantile of the null's choices.
        high: its 97.5 % quantile.
    """

    ranks: Int[np.ndarray, " r"]
    choices: Float[np.ndarray, " r"]
    weighted: Float[np.ndarray, " r"]
    low: Float[np.ndarray, " r"]
    high: Float[np.ndarray, " r"]


@dataclass(frozen=True)
class Load:
    """How one layer's experts are used.

    Attributes:
        layer: index of the block.
        kind: its class.
        n_experts: N.
        n_heads: h; 1 for a router.
        k: distinct experts per head.
        tokens: n, how many chose.
        choices: the spread when every choice counts alike.
        weighted: the spread when choices count by |weight|; NaN where all weights are zero.
        uniform: of choices under the null, mean over draws; `used` is exact.
        standing: number of experts that at least 90 % of the tokens choose, in any head.
        standing_share: share of the choices that they hold.
        standing_uniform: its exact mean under the null.
        standing_chance: its maximum in a thousand draws of the null.
        twice: share of a token's h k choices that repeat another head's; NaN for one head.
        twice_uniform: the same under the null.
        overlap: mean Jaccard index |A ∩ B| / |A ∪ B| of the experts of two heads, over tokens and
            pairs of heads, in [0, 1]; NaN for one head.
        overlap_uniform: the same under the null.
        margin: median over tokens and heads of `ExpertChoices.margins`; NaN where k = N.
        tied: share of tokens and heads whose k-th and (k + 1)-th score tie.
        ranked: the loads themselves.
    """

    layer: int
    kind: str
    n_experts: int
    n_heads: int
    k: int
    tokens: int
    choices: Spread
    weighted: Spread
    uniform: Spread
    standing: int
    standing_share: float
    standing_uniform: float
    standing_chance: float
    twice: float
    twice_uniform: float
    overlap: float
    overlap_uniform: float
    margin: float
    tied: float
    ranked: Ranked = figure_only()

    @property
    def collapsed(self) -> bool:
        """Whether standing experts hold nearly all the load, more than by chance."""
        return self.stands_out and self.standing_share >= STANDING

    @property
    def stands_out(self) -> bool:
        """Whether standing experts hold more than random choice gives them."""
        return self.standing_share > self.standing_chance

    @property
    def evenness(self) -> float:
        """The effective experts, as a share of the null's."""
        return self.choices.effective / self.uniform.effective


def measure_load(chosen: ExpertChoices, seed: int) -> Load:
    """Measure how a layer's experts are used.

    Args:
        chosen: what its tokens choose.
        seed: of the null, and of the sample of tokens on which heads are compared.
    """
    tokens, heads, k = chosen.indices.shape
    total, size = chosen.n_experts, heads * k
    counts = np.bincount(chosen.indices.ravel(), minlength=total)
    weighted = np.bincount(
        chosen.indices.ravel(), np.abs(chosen.weights).ravel().astype(np.float64), total
    )
    by_token = np.sort(chosen.indices.reshape(tokens, size), axis=-1)
    first = np.diff(by_token, axis=-1, prepend=-1) > 0
    served = np.bincount(by_token[first], minlength=total) / tokens
    standing = served * tokens >= count_fewest(tokens) - 0.5
    uniform, low, high = draw_uniform(total, heads, k, tokens, seed)
    by_chance, most = bound_standing(total, heads, k, tokens, seed)
    ranks = choose_ranks(total)
    several, inclusion = heads > 1, k / total
    distinct = total * (1 - (1 - inclusion) ** heads)
    margins = chosen.margins[~np.isnan(chosen.margins)]
    return Load(
        layer=chosen.layer,
        kind=chosen.kind,
        n_experts=total,
        n_heads=heads,
        k=k,
        tokens=tokens,
        choices=measure_spread(counts, size),
        weighted=measure_spread(weighted, size),
        uniform=uniform,
        standing=int(standing.sum()),
        standing_share=float(counts[standing].sum() / counts.sum()),
        standing_uniform=by_chance,
        standing_chance=most,
        twice=float(1 - first.mean()) if several else math.nan,
        twice_uniform=1 - distinct / size if several else math.nan,
        overlap=_measure_overlap(chosen.indices, np.random.default_rng(seed))
        if several
        else math.nan,
        overlap_uniform=expect_overlap(total, k) if several else math.nan,
        margin=float(np.median(margins)) if margins.size else math.nan,
        tied=float(chosen.tied.mean()),
        ranked=Ranked(ranks, rank_loads(counts, ranks), rank_loads(weighted, ranks), low, high),
    )


def _measure_overlap(indices: Int[np.ndarray, "n h k"], rng: np.random.Generator) -> float:
    """Measure the mean Jaccard index of the experts of two heads, on a sample of the tokens."""
    tokens, heads, k = indices.shape
    most = max(1, PAIR_ENTRIES // (heads * k) ** 2)
    if tokens > most:
        indices = indices[rng.choice(tokens, most, replace=False)]
    found = []
    for i in range(heads):
        for j in range(i):
            both = (indices[:, i, :, None] == indices[:, j, None, :]).sum((-1, -2))
            found.append((both / (2 * k - both)).mean())
    return float(np.mean(found))
