"""Single-neuron experts by matrix products over every expert, a block of tokens at a time.

With spread(w) [tokens e] the matrix that holds w[t, c] at column bags[t, c], added where an expert
is chosen twice:

    scores:  (x @ tableᵀ) at bags        sum:  spread(weights) @ table

each the other's gradient, and spread(weights)ᵀ @ x the table's.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.precision import disable_autocast

BLOCK_BYTES = 16 * 2**20
"""The budget of a block's [tokens e]: of the powers of two from 1 to 64 MiB, the fastest on most
shapes. A single token's row is computed whatever it takes."""


def dense_scores(
    x: Float[Tensor, "tokens d"], table: Float[Tensor, "e d"], bags: Int[Tensor, "tokens chosen"]
) -> Float[Tensor, "tokens chosen"]:
    """Return x · table_e for each chosen expert. Differentiable in x and table."""
    return _Scores.apply(x, table, bags)


def dense_sum(
    weights: Float[Tensor, "tokens chosen"],
    table: Float[Tensor, "e d"],
    bags: Int[Tensor, "tokens chosen"],
) -> Float[Tensor, "tokens d"]:
    """Return Σ weights · table_e over the chosen. Differentiable in weights and table."""
    return _Sum.apply(weights, table, bags)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, bags):
        ctx.save_for_backward(x, table, bags)
        return _scores(x, table, bags)

    @staticmethod
    def backward(ctx, *grads):
        x, table, bags = ctx.saved_tensors
        of_x, of_table, _ = ctx.needs_input_grad
        return (
            _sum(grads[0], table, bags) if of_x else None,
            _table_grad(grads[0], x, table, bags) if of_table else None,
            None,
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, table, bags):
        ctx.save_for_backward(weights, table, bags)
        return _sum(weights, table, bags)

    @staticmethod
    def backward(ctx, *grads):
        weights, table, bags = ctx.saved_tensors
        of_weights, of_table, _ = ctx.needs_input_grad
        return (
            _scores(grads[0], table, bags) if of_weights else None,
            _table_grad(weights, grads[0], table, bags) if of_table else None,
            None,
        )


def _scores(x: Tensor, table: Tensor, bags: Tensor) -> Tensor:
    with disable_autocast(table):
        blocks = _blocks(bags, table)
        return torch.cat([(x[block] @ table.T).gather(1, bags[block]) for block in blocks])


def _sum(weights: Tensor, table: Tensor, bags: Tensor) -> Tensor:
    with disable_autocast(table):
        blocks = _blocks(bags, table)
        return torch.cat([_spread(weights[block], table, bags[block]) @ table for block in blocks])


def _table_grad(weights: Tensor, x: Tensor, table: Tensor, bags: Tensor) -> Tensor:
    grad = torch.zeros_like(table)
    with disable_autocast(table):
        for block in _blocks(bags, table):
            grad.addmm_(_spread(weights[block], table, bags[block]).T, x[block])
    return grad


def _spread(weights: Tensor, table: Tensor, bags: Tensor) -> Tensor:
    return weights.new_zeros(len(bags), len(table)).scatter_add_(1, bags, weights)


def _blocks(bags: Tensor, table: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES // (len(table) * table.element_size()))
    return (slice(start, start + size) for start in range(0, max(1, len(bags)), size))
