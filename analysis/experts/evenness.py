"""How evenly a layer's experts are used, beside what uniform random choice would make of it.

The null: each head and token draws its k distinct experts uniformly. An expert is then chosen by
a head and token with probability k/N, and over n tokens and h heads Binomial(n h, k/N) times, so
that 1 − (1 − k/N)^(n h) of the experts are used; with k = 1 this is 1 − (1 − 1/N)^m of m draws.
It serves a token, in whichever head, with probability q = 1 − (1 − k/N)^h.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int, Real

from analysis.experts.choices import Chosen
from analysis.record import figure_only
from analysis.statistics import distributions

STANDING = 0.9
"""Share of the tokens that a standing expert serves; and of the load that makes a collapse."""
ROUNDS = 40
"""Draws of the null: its 2.5 % and 97.5 % quantiles are then near its ends."""
STANDING_ROUNDS = 1000
"""Draws of the null of standing experts: a layer beats all by chance once in a thousand."""
MOST_RANKS = 160
"""Points of a curve by rank, evenly spaced in its logarithm."""
PAIR_ENTRIES = 2**24
"""Comparisons of chosen experts that are made for the overlap of heads, at most about."""


@dataclass(frozen=True)
class Spread:
    """How a load is spread over a layer's N experts.

    Attributes:
        used: share of the experts with any load, in [0, 1].
        effective: e^H: equally loaded experts of the same entropy, 1 … N.
        kl: KL(load ‖ uniform), nats, 0 … log N.
        gini: 0 (uniform) … 1 − 1/N (one expert).
        covering: fewest experts that hold 50, 90 and 99 % of the load.
        top: share held by the h k experts with most, as many as one token chooses.
    """

    used: float
    effective: float
    kl: float
    gini: float
    covering: tuple[float, float, float]
    top: float


@dataclass(frozen=True)
class Ranked:
    """Loads by rank, in multiples of the mean load of all experts.

    Attributes:
        ranks: from 1, evenly spaced in the logarithm.
        choices: of the expert of this rank by choices; 0 where experts are not used.
        weighted: of the expert of this rank by |weight|.
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
        k: distinct experts a head.
        tokens: n, that chose.
        choices: every choice counted alike.
        weighted: every choice counted by its |weight|; NaN where all weights are zero.
        uniform: of choices under the null, the mean over draws; `used` exactly.
        standing: experts that at least 90 % of the tokens choose, in whichever head.
        standing_share: share of the choices that they hold.
        standing_uniform: the same under the null, the mean, exactly.
        standing_chance: the most it came to in a thousand draws of the null.
        twice: share of a token's h k choices that repeat another head's; NaN for one head.
        twice_uniform: the same under the null.
        overlap: mean Jaccard index |A ∩ B| / |A ∪ B| of the experts of two heads, over tokens and
            pairs of heads, in [0, 1]; NaN for one head.
        overlap_uniform: the same under the null.
        margin: median over tokens and heads of `Chosen.margins`; NaN where k = N.
        tied: share of choices whose k-th and (k + 1)-th score tie.
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
        """Whether nearly all load is on experts that nearly all tokens choose, unlike by chance."""
        return self.stands_out and self.standing_share >= STANDING

    @property
    def stands_out(self) -> bool:
        """Whether standing experts hold more than random choice gives them."""
        return self.standing_share > self.standing_chance

    @property
    def evenness(self) -> float:
        """The effective experts, as a share of the null's."""
        return self.choices.effective / self.uniform.effective


def load(chosen: Chosen, seed: int) -> Load:
    """Measure how a layer's experts are used.

    Args:
        chosen: what its tokens chose.
        seed: of the null, and of the tokens on which heads are compared.
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
    standing = served * tokens >= _fewest(tokens) - 0.5
    uniform, low, high = null(total, heads, k, tokens, seed)
    by_chance, most = standing_null(total, heads, k, tokens, seed)
    ranks = _ranks(total)
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
        choices=spread(counts, size),
        weighted=spread(weighted, size),
        uniform=uniform,
        standing=int(standing.sum()),
        standing_share=float(counts[standing].sum() / counts.sum()),
        standing_uniform=by_chance,
        standing_chance=most,
        twice=float(1 - first.mean()) if several else math.nan,
        twice_uniform=1 - distinct / size if several else math.nan,
        overlap=_overlap(chosen.indices, np.random.default_rng(seed)) if several else math.nan,
        overlap_uniform=overlap_uniform(total, k) if several else math.nan,
        margin=float(np.median(margins)) if margins.size else math.nan,
        tied=float(chosen.tied.mean()),
        ranked=Ranked(ranks, _by_rank(counts, ranks), _by_rank(weighted, ranks), low, high),
    )


def spread(counts: Real[np.ndarray, " e"], size: int) -> Spread:
    """Return how a load [e] is spread, NaN where there is none.

    Args:
        counts: ≥ 0.
        size: experts that a token chooses.
    """
    p = distributions.shares(counts)
    half, most, nearly = (float(distributions.coverage(p, share)) for share in (0.5, 0.9, 0.99))
    return Spread(
        used=float((counts > 0).mean()),
        effective=float(distributions.effective_number(p)),
        kl=float(distributions.kl_to_uniform(p)),
        gini=float(distributions.gini(p)),
        covering=(half, most, nearly),
        top=float(np.sort(p)[-size:].sum()),
    )


@lru_cache(maxsize=64)
def null(
    total: int, heads: int, k: int, tokens: int, seed: int
) -> tuple[Spread, Float[np.ndarray, " r"], Float[np.ndarray, " r"]]:
    """Return the spread under uniform random choice, and the band of its loads by rank."""
    rng, size, ranks = np.random.default_rng(seed), heads * k, _ranks(total)
    spreads, curves = [], []
    for _ in range(ROUNDS):
        counts = rng.binomial(tokens * heads, k / total, size=total)
        # Never empty, though a handful of tokens and a million experts might draw so.
        counts[0] += counts.sum() == 0
        spreads.append(spread(counts, size))
        curves.append(_by_rank(counts, ranks))
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    names = ("used", "effective", "kl", "gini", "top")
    means = {name: float(np.mean([getattr(s, name) for s in spreads])) for name in names}
    half, most, nearly = np.mean([s.covering for s in spreads], axis=0).tolist()
    mean = Spread(covering=(half, most, nearly), **means)
    return replace(mean, used=1 - (1 - k / total) ** (tokens * heads)), low, high


@lru_cache(maxsize=64)
def standing_null(total: int, heads: int, k: int, tokens: int, seed: int) -> tuple[float, float]:
    """Return the share of the choices on standing experts under the null: its mean, its most.

        mean = P(1 + B ≥ 0.9 n),  B ~ Binomial(n − 1, q)

    since the token of a choice is served already, and each of the others with probability q.
    """
    q, fewest = 1 - (1 - k / total) ** heads, _fewest(tokens)
    mean = _binomial_tail(tokens - 1, q, fewest - 1)
    # By Markov's inequality no draw has any then; and a million experts need not be drawn.
    if mean * tokens * q * total < 1e-6 * fewest:
        return mean, 0.0
    rng, most = np.random.default_rng(seed), 0.0
    for _ in range(STANDING_ROUNDS):
        served = rng.binomial(tokens, q, size=total)
        most = max(most, float(served[served >= fewest].sum() / max(1, served.sum())))
    return mean, most


def _fewest(tokens: int) -> int:
    """Return how many tokens a standing expert serves at least."""
    return math.ceil(STANDING * tokens - 1e-9)


def _binomial_tail(n: int, q: float, fewest: int) -> float:
    """Return P(B ≥ fewest) of B ~ Binomial(n, q)."""
    if q >= 1 or fewest <= 0:
        return 1.0
    of = np.arange(fewest, n + 1)
    ways = [math.lgamma(n + 1) - math.lgamma(s + 1) - math.lgamma(n - s + 1) for s in of.tolist()]
    return min(1.0, float(np.exp(ways + of * math.log(q) + (n - of) * math.log1p(-q)).sum()))


def _ranks(total: int) -> Int[np.ndarray, " r"]:
    return np.unique(np.geomspace(1, total, MOST_RANKS).round().astype(np.int64))


def _by_rank(counts: Real[np.ndarray, " e"], ranks: Int[np.ndarray, " r"]) -> np.ndarray:
    mean = counts.mean() or 1.0
    return np.sort(counts)[::-1][ranks - 1] / mean


def _overlap(indices: Int[np.ndarray, "n h k"], rng: np.random.Generator) -> float:
    """Return the mean Jaccard index of two heads' experts; of many tokens, a sample's."""
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


def overlap_uniform(total: int, k: int) -> float:
    """Return the mean Jaccard index of two random sets of k: their overlap is hypergeometric."""
    mean, ways = 0.0, math.comb(total, k)
    for both in range(max(0, 2 * k - total), k + 1):
        chance = math.comb(k, both) * math.comb(total - k, k - both) / ways
        mean += chance * both / (2 * k - both)
    return mean
