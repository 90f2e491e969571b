"""How a load is spread over a layer's experts, and how uniform random choice would spread it.

The null: each head and token draws its k distinct experts uniformly. A head and token then choose
an expert with probability k/N; over n tokens and h heads, it is chosen Binomial(n h, k/N) times, so
that 1 − (1 − k/N)^(n h) of the experts are used. It serves a token, in any head, with probability
q = 1 − (1 − k/N)^h.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int, Real

from analysis.statistics import distributions

STANDING = 0.9
"""Share of the tokens that a standing expert serves; also the share of load that is a collapse."""
ROUNDS = 40
"""Draws of the null, enough to estimate its 2.5 % and 97.5 % quantiles."""
STANDING_ROUNDS = 1000
"""Draws of the null of standing experts: by chance, a layer exceeds all of them once in 1,000."""
MOST_RANKS = 160
"""Maximum number of points of a curve by rank, evenly spaced in the logarithm."""


@dataclass(frozen=True)
class Spread:
    """How a load is spread over a layer's N experts.

    Attributes:
        used: share of the experts with any load, in [0, 1].
        effective: e^H, the number of equally loaded experts with the same entropy, 1 … N.
        kl: KL(load ‖ uniform), nats, 0 … log N.
        gini: 0 (uniform) … 1 − 1/N (one expert).
        covering: the fewest experts that hold 50, 90 and 99 % of the load.
        top: share held by the h k most loaded experts, as many as one token chooses.
    """

    used: float
    effective: float
    kl: float
    gini: float
    covering: tuple[float, float, float]
    top: float


def measure_spread(counts: Real[np.ndarray, " e"], size: int) -> Spread:
    """Measure how a load [e] is spread; NaN where there is none.

    Args:
        counts: ≥ 0.
        size: experts that a token chooses.
    """
    p = distributions.compute_shares(counts)
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
def draw_uniform(
    total: int, heads: int, k: int, tokens: int, seed: int
) -> tuple[Spread, Float[np.ndarray, " r"], Float[np.ndarray, " r"]]:
    """Return the mean spread under the null, and the 95 % band of its loads by rank."""
    rng, size, ranks = np.random.default_rng(seed), heads * k, choose_ranks(total)
    spreads, curves = [], []
    for _ in range(ROUNDS):
        counts = rng.binomial(tokens * heads, k / total, size=total)
        # A few tokens and a million experts might draw no expert at all.
        counts[0] += counts.sum() == 0
        spreads.append(measure_spread(counts, size))
        curves.append(rank_loads(counts, ranks))
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    names = ("used", "effective", "kl", "gini", "top")
    means = {name: float(np.mean([getattr(s, name) for s in spreads])) for name in names}
    half, most, nearly = np.mean([s.covering for s in spreads], axis=0).tolist()
    mean = Spread(covering=(half, most, nearly), **means)
    return replace(mean, used=1 - (1 - k / total) ** (tokens * heads)), low, high


@lru_cache(maxsize=64)
def bound_standing(total: int, heads: int, k: int, tokens: int, seed: int) -> tuple[float, float]:
    """Return the share of the choices on standing experts under the null: its mean and maximum.

        mean = P(1 + B ≥ 0.9 n),  B ~ Binomial(n − 1, q)

    since an expert that is chosen serves one token for certain, the others with probability q.
    """
    q, fewest = 1 - (1 - k / total) ** heads, count_fewest(tokens)
    mean = _binomial_tail(tokens - 1, q, fewest - 1)
    # By Markov's inequality no draw has a standing expert, so there is no need to draw.
    if mean * tokens * q * total < 1e-6 * fewest:
        return mean, 0.0
    rng, most = np.random.default_rng(seed), 0.0
    for _ in range(STANDING_ROUNDS):
        served = rng.binomial(tokens, q, size=total)
        most = max(most, float(served[served >= fewest].sum() / max(1, served.sum())))
    return mean, most


def count_fewest(tokens: int) -> int:
    """Return the fewest tokens that a standing expert serves."""
    return math.ceil(STANDING * tokens - 1e-9)


def _binomial_tail(n: int, q: float, fewest: int) -> float:
    """Return P(B ≥ fewest) for B ~ Binomial(n, q)."""
    if q >= 1 or fewest <= 0:
        return 1.0
    of = np.arange(fewest, n + 1)
    ways = [math.lgamma(n + 1) - math.lgamma(s + 1) - math.lgamma(n - s + 1) for s in of.tolist()]
    return min(1.0, float(np.exp(ways + of * math.log(q) + (n - of) * math.log1p(-q)).sum()))


def choose_ranks(total: int) -> Int[np.ndarray, " r"]:
    """Choose the ranks of a curve, from 1, evenly spaced in the logarithm."""
    return np.unique(np.geomspace(1, total, MOST_RANKS).round().astype(np.int64))


def rank_loads(
    counts: Real[np.ndarray, " e"], ranks: Int[np.ndarray, " r"]
) -> Float[np.ndarray, " r"]:
    """Return the loads of the experts at some ranks, in multiples of the mean load."""
    mean = counts.mean() or 1.0
    return np.sort(counts)[::-1][ranks - 1] / mean


def expect_overlap(total: int, k: int) -> float:
    """Return the mean Jaccard index of two random sets of k; their overlap is hypergeometric."""
    mean, ways = 0.0, math.comb(total, k)
    for both in range(max(0, 2 * k - total), k + 1):
        chance = math.comb(k, both) * math.comb(total - k, k - both) / ways
        mean += chance * both / (2 * k - both)
    return mean
