"""How evenly a load is spread over items, and the mutual information of two labels, in nats.

A load is any array of counts, weights or probabilities ≥ 0 along the last axis; p is that load
divided by its sum. Where the sum is 0 there is no distribution, and every quantity is NaN.

    n items    x, y labels
"""

import numpy as np
from jaxtyping import Float, Int, Real


def compute_shares(load: Real[np.ndarray, "*b n"]) -> Float[np.ndarray, "*b n"]:
    """Return p = load / Σ load; NaN where nothing is loaded.

    Raises:
        ValueError: for a load below 0.
    """
    if (load < 0).any():
        raise ValueError(f"load={load.min()}: must be ≥ 0")
    total = load.sum(axis=-1, keepdims=True, dtype=np.float64)
    return np.divide(load, total, out=np.full(load.shape, np.nan), where=total > 0)


def entropy(load: Real[np.ndarray, "*b n"]) -> Float[np.ndarray, "*b"]:
    """Return H(p) = −Σ p log p, nats, from 0 (one item) to log n (uniform)."""
    p = compute_shares(load)
    surprise = np.log(p, out=np.zeros_like(p), where=p > 0)
    # Rounding must not turn a single item's −0 or −1e-17 into a negative entropy.
    return np.asarray(np.maximum(-(p * surprise).sum(axis=-1), 0.0))


def effective_number(load: Real[np.ndarray, "*b n"]) -> Float[np.ndarray, "*b"]:
    """Return e^H: how many equally loaded items have this entropy, from 1 to n.

    Source: Hill, Ecology 54 (1973), 427: the diversity number of order 1.
    """
    return np.asarray(np.exp(entropy(load)))


def kl_to_uniform(load: Real[np.ndarray, "*b n"]) -> Float[np.ndarray, "*b"]:
    """Return KL(p ‖ uniform) = log n − H(p), nats, from 0 (uniform) to log n (one item)."""
    return np.asarray(np.maximum(np.log(load.shape[-1]) - entropy(load), 0.0))


def gini(load: Real[np.ndarray, "*b n"]) -> Float[np.ndarray, "*b"]:
    """Return the Gini coefficient, from 0 (uniform) to 1 − 1/n (one item).

        G = Σ_ij |p_i − p_j| / 2n = Σ_i (2i − n − 1) p_(i) / n, p_(1) ≤ … ≤ p_(n)

    Source: Sen, On Economic Inequality (1973), § 2.7.
    """
    n = load.shape[-1]
    ranks = 2 * np.arange(1, n + 1) - n - 1
    return np.asarray(
        np.maximum((np.sort(compute_shares(load), axis=-1) * ranks).sum(axis=-1) / n, 0.0)
    )


def coverage(load: Real[np.ndarray, "*b n"], share: float) -> Float[np.ndarray, "*b"]:
    """Return the least number of items that together hold a share of the load, 1 … n.

    Raises:
        ValueError: for a share out of bounds.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: must be in (0, 1]")
    p = compute_shares(load)
    held = np.cumsum(-np.sort(-p, axis=-1), axis=-1)
    # Nine of ten equal items hold 90 %, whatever rounding makes of the sum.
    fewest = (held < share - 1e-9).sum(axis=-1) + 1.0
    return np.asarray(np.where(np.isnan(p).any(axis=-1), np.nan, fewest))


def count_joint(
    x: Int[np.ndarray, "n ..."], y: Int[np.ndarray, " n"]
) -> Int[np.ndarray, "n_x n_y"]:
    """Count how often each label of x occurs with each of y; the m labels x[i] all go with y[i]."""
    n_x, n_y = int(x.max()) + 1, int(y.max()) + 1
    met = x * n_y + y.reshape(len(y), *(1,) * (x.ndim - 1))
    return np.bincount(met.ravel(), minlength=n_x * n_y).reshape(n_x, n_y)


def mutual_information(counts: Real[np.ndarray, "x y"]) -> float:
    """Return I(x; y) = H(x) + H(y) − H(x, y) of a table of counts, nats, ≥ 0: the plug-in value.

    Its bias is about (n_x − 1)(n_y − 1) / 2N with N counts, even if x and y are independent: show
    it beside `permutation_null` or `miller_madow`.
    """
    both = float(entropy(counts.ravel()))
    return max(0.0, float(entropy(counts.sum(1)) + entropy(counts.sum(0))) - both)


def miller_madow(counts: Real[np.ndarray, "x y"]) -> float:
    """Return I(x; y) with each entropy's bias corrected to first order, nats; may be below 0.

        I + (m_x + m_y − m_xy − 1) / 2N

    with m_x, m_y, m_xy the number of rows, columns and cells with counts, and N the counts. It
    assumes independent counts; where they are not, trust `permutation_null`.

    Source: Miller 1955, "Note on the bias of information estimates".
    """
    seen = counts > 0
    cells = int(seen.any(1).sum()) + int(seen.any(0).sum()) - int(seen.sum()) - 1
    return mutual_information(counts) + cells / (2 * float(counts.sum()))


def permutation_null(
    x: Int[np.ndarray, "n ..."],
    y: Int[np.ndarray, " n"],
    rng: np.random.Generator,
    rounds: int = 100,
) -> Float[np.ndarray, " rounds"]:
    """Return I(x; y), plug-in, nats, under shuffled y: the values that chance and bias alone give.

    The m labels x[i] stay together, since choices made at once are not independent.

    Args:
        rounds: shuffles; the p-value (1 + those that reach the value) / (1 + rounds) is no finer.
    """
    shuffled = (count_joint(x, rng.permutation(y)) for _ in range(rounds))
    return np.array([mutual_information(counts) for counts in shuffled])
