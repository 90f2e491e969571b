"""Product keys: rows + columns keys address rows · columns experts, and the best k are exact.

Expert e = row · columns + column scores row_scores[row] + column_scores[column]. The sum grows
with either term, so the best k pairs lie among the best k rows and the best k columns.

    r rows    c columns    (here only: elsewhere r is retrieval and c a chunk)
"""

from collections.abc import Iterable
from math import isqrt

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.constants import keep_on_accelerator

MOST = 2**32
"""Experts that a grid of keys may have: finding the factors tries numbers up to the root."""


def factor(n_experts: int) -> tuple[int, int]:
    """Return the most square (rows, columns) with rows · columns = n_experts, rows ≤ columns.

    3072 = 48 × 64 and 8192 = 64 × 128, where isqrt(n_experts)² leaves experts unreachable.

    Raises:
        ValueError: below 1, or for a prime above 3, whose only factors are one row of n_experts.

    Source: θ_eK of § Efficient Retrieval Experts; errata C2 and C4.
    """
    if not 1 <= n_experts <= MOST:
        raise ValueError(f"n_experts={n_experts}: must be in 1 … {MOST:,}")
    rows, columns = _factor_most_evenly(n_experts)
    if rows == 1 and n_experts > 3:
        near = (
            _suggest_number(range(n_experts, 0, -1)),
            _suggest_number(range(n_experts, 2 * n_experts)),
        )
        raise ValueError(
            f"n_experts={n_experts}: must be a product of rows and columns, and is prime; "
            f"near numbers that factor: {' and '.join(near)}"
        )
    return rows, columns


def product_topk(
    row_scores: Float[Tensor, "*b r"], column_scores: Float[Tensor, "*b c"], k: int
) -> tuple[Float[Tensor, "*b k"], Int[Tensor, "*b k"]]:
    """Return the k largest sums of a row's and a column's score, largest first, and their experts.

    The i-th best row with the j-th best column is no better than i · j − 1 other pairs, so only
    pairs with i · j ≤ k are looked at: about k ln k sums in place of r · c. Which of tied experts
    is chosen is left open. Differentiable in both scores.

    Args:
        row_scores: any real numbers, [... r].
        column_scores: the same, [... c].
        k: 1 ≤ k ≤ r · c.

    Returns:
        scores [... k], and indices [... k] in 0 … r · c − 1.

    Raises:
        ValueError: for k out of range.

    Source: the third step of § Efficient Retrieval Experts; lst:cdmoe, erratum C1.
    """
    _require_k(row_scores, column_scores, k)
    best_rows, row_indices = row_scores.topk(min(k, row_scores.shape[-1]), dim=-1)
    best_columns, column_indices = column_scores.topk(min(k, column_scores.shape[-1]), dim=-1)
    # Autograd has no need to see the search: the gradient is that of the k sums.
    with torch.no_grad():
        sizes = best_rows.shape[-1], best_columns.shape[-1], k
        row_ranks, column_ranks = _list_possible_ranks(row_scores.device, *sizes)
        sums = best_rows.index_select(-1, row_ranks) + best_columns.index_select(-1, column_ranks)
        chosen = sums.topk(k, dim=-1).indices
        row_ranks, column_ranks = row_ranks[chosen], column_ranks[chosen]
    scores = best_rows.gather(-1, row_ranks) + best_columns.gather(-1, column_ranks)
    row, column = row_indices.gather(-1, row_ranks), column_indices.gather(-1, column_ranks)
    return scores, row * column_scores.shape[-1] + column


def naive_product_topk(
    row_scores: Float[Tensor, "*b r"], column_scores: Float[Tensor, "*b c"], k: int
) -> tuple[Float[Tensor, "*b k"], Int[Tensor, "*b k"]]:
    """The obvious form, over all r · c sums: the reference for `product_topk`."""
    _require_k(row_scores, column_scores, k)
    scores, indices = _add_all_pairs(row_scores, column_scores).topk(k, dim=-1)
    return scores, indices


@keep_on_accelerator
def _list_possible_ranks(
    device: torch.device, rows: int, columns: int, k: int
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return the ranks (from 0) of the row and of the column of every pair that can be chosen."""
    pairs = [(i, j) for i in range(rows) for j in range(min(columns, k // (i + 1)))]
    row_ranks, column_ranks = torch.tensor(pairs).T.contiguous().to(device)
    return row_ranks, column_ranks


def _add_all_pairs(
    row_scores: Float[Tensor, "*b r"], column_scores: Float[Tensor, "*b c"]
) -> Float[Tensor, "*b r*c"]:
    return (row_scores[..., :, None] + column_scores[..., None, :]).flatten(-2)


def _require_k(row_scores: Tensor, column_scores: Tensor, k: int) -> None:
    rows, columns = row_scores.shape[-1], column_scores.shape[-1]
    if not 1 <= k <= rows * columns:
        raise ValueError(f"k={k}: must be in 1 … {rows * columns}, for {rows} × {columns} experts")


def _factor_most_evenly(n: int) -> tuple[int, int]:
    rows = next(rows for rows in range(isqrt(n), 0, -1) if n % rows == 0)
    return rows, n // rows


def _suggest_number(numbers: Iterable[int]) -> str:
    """Name the first number worth suggesting: with at most twice as many columns as rows."""
    for n in numbers:
        rows, columns = _factor_most_evenly(n)
        if columns <= 2 * rows:
            return f"{n} = {rows} × {columns}"
    raise AssertionError("a power of two lies in every range from n up to 2n, and 2 = 1 × 2 below")
