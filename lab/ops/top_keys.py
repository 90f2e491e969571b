"""Which keys a query may read: the causal ones, or the few of those with the highest bias.

Biases are replaced by ranks, distinct whole numbers. The w keys of highest rank among a query's
past are those whose rank reaches its floor, the w-th highest rank there. So a window is stored as
two lists of whole numbers, [s] and [t], and becomes a matrix only where one is needed.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def causal_keep(n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "t s"]:
    """Return which keys each query may read; the last query stands at the last key.

    Raises:
        ValueError: when there are more queries than keys.

    Source: lst:dynamic_mask. Departs: with one query and many keys the listing shows key 0 alone
        (erratum D3); here the diagonal is offset by s - t.
    """
    if n_queries > n_keys:
        raise ValueError(f"n_queries={n_queries} must be at most n_keys={n_keys}")
    every = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    return every.tril(n_keys - n_queries)


def causal_keep_at(at: Int[Tensor, "b t"], n_keys: int) -> Bool[Tensor, "b 1 t s"]:
    """Return which keys each query may read, given where in its row each query stands."""
    return (torch.arange(n_keys, device=at.device) <= at[..., None])[:, None]


def top_keys_at(
    key_bias: Float[Tensor, "b h s"], window: int, at: Int[Tensor, "b t"]
) -> Bool[Tensor, "b h t s"]:
    """Return `top_keys` of queries that stand at some positions of their rows alone.

    Raises:
        ValueError: for a window below one.
    """
    n_keys = key_bias.shape[-1]
    rank, floor = ranks_and_floors(key_bias, window, n_keys)
    floor = floor.take_along_dim(at[:, None], 2)
    return causal_keep_at(at, n_keys) & (rank[..., None, :] >= floor[..., None])


def top_keys(
    key_bias: Float[Tensor, "b h s"], window: int, n_queries: int
) -> Bool[Tensor, "b h t s"]:
    """Return, for each query, the `window` keys of highest bias among those it may read.

    Key s stays for query t when fewer than `window` keys s' ≤ t outrank it. Of equal biases the
    later key outranks, so a constant bias gives sliding-window attention.

    Args:
        key_bias: of every key; any numbers but NaN.
        window: keys w that a query keeps, ≥ 1.
        n_queries: the queries stand at the positions of the last n_queries keys.

    Raises:
        ValueError: for a window below one, or more queries than keys.

    Source: the authors' later code, in transformers 5.23.0 (Doge), which puts the causal mask
        before its top-k, so that every query ranks its own past. Departs: leaves the order of
        equal biases to topk; here it is defined.
    """
    keep = causal_keep(n_queries, key_bias.shape[-1], key_bias.device)
    rank, floor = ranks_and_floors(key_bias, window, n_queries)
    return keep & (rank[..., None, :] >= floor[..., :, None])


def ranks_and_floors(
    key_bias: Float[Tensor, "b h s"], window: int, n_queries: int
) -> tuple[Int[Tensor, "b h s"], Int[Tensor, "b h t"]]:
    """Return every key's rank, and the lowest rank that each query keeps among its causal keys.

    Time and memory grow as s log s, without a matrix of queries and keys.

    Raises:
        ValueError: for a window below one.
    """
    if window < 1:
        raise ValueError(f"{window=} must be at least 1")
    n_keys = key_bias.shape[-1]
    order = key_bias.detach().argsort(dim=-1, stable=True)
    position = torch.arange(n_keys, device=key_bias.device)
    rank = torch.empty_like(order).scatter_(-1, order, position.expand_as(order))
    past = position[n_keys - n_queries :] + 1
    nth = (past - window).clamp(min=0)
    if n_queries == 1:
        # The past is everything, where ranks are 0 … s-1.
        return rank, nth.expand(*rank.shape[:-1], 1)
    return rank, _nth_lowest_of_prefix(rank, past, nth)


def _nth_lowest_of_prefix(
    rank: Int[Tensor, "b h s"], past: Int[Tensor, " t"], nth: Int[Tensor, " t"]
) -> Int[Tensor, "b h t"]:
    """Return the nth lowest, from 0, of the first `past` ranks, for each query.

    A wavelet matrix: the ranks are sorted bit by bit from the highest, stably, so that at each
    bit a prefix stays an interval [start, stop) in either half, found from the count of zeros.

    Source: Claude, Navarro and Ordóñez, "The wavelet matrix" (2015).
    """
    n_keys = rank.shape[-1]
    shape = (*rank.shape[:-1], len(past))
    start, stop, nth = (x.expand(shape) for x in (torch.zeros_like(past), past, nth))
    found = torch.zeros_like(stop)
    for bit in reversed(range((n_keys - 1).bit_length())):
        is_zero = (rank >> bit) & 1 == 0
        zeros = torch.nn.functional.pad(is_zero.cumsum(-1), (1, 0))
        zeros_before, n_zeros = zeros[..., :-1], zeros[..., -1:]
        low_start, low_stop = zeros.gather(-1, start), zeros.gather(-1, stop)
        high = nth >= low_stop - low_start
        found = found + (high.long() << bit)
        nth = torch.where(high, nth - (low_stop - low_start), nth)
        start = torch.where(high, n_zeros + start - low_start, low_start)
        stop = torch.where(high, n_zeros + stop - low_stop, low_stop)
        ones_before = torch.arange(n_keys, device=rank.device) - zeros_before
        place = torch.where(is_zero, zeros_before, n_zeros + ones_before)
        rank = torch.empty_like(rank).scatter_(-1, place, rank)
    return found


def top_keys_by_counting(
    key_bias: Float[Tensor, "b h s"], window: int, n_queries: int
) -> Bool[Tensor, "b h t s"]:
    """The obvious form, counting who outranks whom [s s]: the reference for `top_keys`."""
    n_keys = key_bias.shape[-1]
    contender, key = key_bias[..., :, None], key_bias[..., None, :]
    position = torch.arange(n_keys, device=key_bias.device)
    outranks = (contender > key) | ((contender == key) & (position[:, None] > position))
    higher = outranks.cumsum(-2, dtype=torch.int32)[..., n_keys - n_queries :, :]
    return causal_keep(n_queries, n_keys, key_bias.device) & (higher < window)
