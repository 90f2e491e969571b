"""Single-neuron experts: expert e reads x · down_e and writes a multiple of up_e.

The two halves are each other's adjoint: for tables of equal shape,

    ⟨expert_sum(w, table, i), x⟩ = ⟨w, expert_scores(x, table, i)⟩

Two backends, of the same values and gradients, neither with the chosen rows [b t h k d] in memory:

    gather  reads the chosen rows: torch's embedding bag, which is `expert_sum`, serves both halves,
            forward and backward. Memory beyond arguments, results and table gradients is
            O(b t (h k + d)).
    dense   multiplies with every row, a block of tokens at a time (`lab.ops.experts`).

"auto" takes the cheaper by a model of one token's time, both halves, forward and backward:

    gather: h k · (row + d · entry),  `GATHER_NS`        dense: e · (row + d · entry),  `DENSE_NS`

whatever the device: the constants are one CPU core's, an EPYC's with AVX-512, on tables that fit
its caches. There, at d 32 to 256, 64 to 16,384 experts, 8 to 128 of them chosen and 1,024 or 2,048
tokens, it names the faster in all 42 cases: dense where the experts for each chosen one are few,
the fewer the wider the rows. Larger tables slow both, the few chosen rows more. Other machines,
GPUs above all, have other constants: name a backend there.
"""

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import vjp

from lab.ops.derivatives import differentiate, differentiate_twice, needs_plain
from lab.ops.precision import disable_autocast
from tasks.bounds import check_choice

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


Backend = Literal["auto", "gather", "dense"]

GATHER_NS = (160.0, 0.47)
"""What each chosen row takes, and each of its entries, to two digits."""
DENSE_NS = (4.5, 0.13)
"""What each row of the table takes, and each of its entries: 12 operations."""


def resolve_experts_backend(backend: str, *, n_experts: int, n_chosen: int, width: int) -> str:
    """Return the backend that a choice of n_chosen of n_experts rows [width] a token runs on.

    "auto" is by the file's model of a CPU core, whatever the device.

    Raises:
        ValueError: for an unknown backend.
    """
    check_choice("backend", backend, get_args(Backend))
    if backend != "auto":
        return backend
    gather, dense = (
        rows * (of_row + of_entry * width)
        for rows, (of_row, of_entry) in ((n_chosen, GATHER_NS), (n_experts, DENSE_NS))
    )
    return "dense" if dense < gather else "gather"


def expert_scores(
    x: Float[Tensor, "b t d"],
    down: Float[Tensor, "e d"],
    indices: Int[Tensor, "b t h k"],
    backend: str = "auto",
) -> Float[Tensor, "b t h k"]:
    """Return x_t · down_e for each chosen expert e = indices[b, t, h, k], in the table's dtype.

    Differentiable in x and down.

    Args:
        x: what the experts read.
        down: the table of reading vectors.
        indices: int64, in 0 … e − 1; an expert may be chosen more than once.
        backend: "gather", "dense", or "auto" for the cheaper.

    Raises:
        ValueError: for an unknown backend.

    Source: the fourth and fifth steps of § Efficient Retrieval Experts.
    """
    if needs_plain():
        return naive_expert_scores(x.to(down.dtype), down, indices)
    bags = indices.flatten(2).flatten(0, 1)
    tokens = x.flatten(0, 1).to(down.dtype)
    if _resolve(backend, down, bags) == "dense":
        return dense_scores(tokens, down, bags).view(indices.shape)
    return _ExpertScores.apply(tokens, down, bags).view(indices.shape)


def expert_sum(
    weights: Float[Tensor, "b t h k"],
    up: Float[Tensor, "e d"],
    indices: Int[Tensor, "b t h k"],
    backend: str = "auto",
) -> Float[Tensor, "b t d"]:
    """Return Σ_hk weights · up_e over the chosen experts e, in the table's dtype.

    Differentiable in weights and up.

    Args:
        weights: what each chosen expert is multiplied by.
        up: the table of written vectors.
        indices: int64, in 0 … e − 1; an expert chosen twice is added twice.
        backend: as in `expert_scores`.

    Raises:
        ValueError: for an unknown backend.

    Source: the last step of § Efficient Retrieval Experts.
    """
    if needs_plain():
        return naive_expert_sum(weights.to(up.dtype), up, indices)
    bags = indices.flatten(2).flatten(0, 1)
    chosen = weights.to(up.dtype).reshape(bags.shape)
    add = dense_sum if _resolve(backend, up, bags) == "dense" else _bag_sum
    return add(chosen, up, bags).unflatten(0, indices.shape[:2])


def naive_expert_scores(
    x: Float[Tensor, "b t d"], down: Float[Tensor, "e d"], indices: Int[Tensor, "b t h k"]
) -> Float[Tensor, "b t h k"]:
    """The obvious form, with every chosen row gathered: the reference for `expert_scores`."""
    return einsum(x, down[indices], "b t d, b t h k d -> b t h k")


def naive_expert_sum(
    weights: Float[Tensor, "b t h k"], up: Float[Tensor, "e d"], indices: Int[Tensor, "b t h k"]
) -> Float[Tensor, "b t d"]:
    """The obvious form, with every chosen row gathered: the reference for `expert_sum`."""
    return einsum(weights, up[indices], "b t h k, b t h k d -> b t d")


def _resolve(backend: str, table: Tensor, bags: Tensor) -> str:
    n_experts, width = table.shape
    return resolve_experts_backend(
        backend, n_experts=n_experts, n_chosen=bags.shape[1], width=width
    )


def _bag_sum(
    weights: Float[Tensor, "tokens chosen"],
    table: Float[Tensor, "e d"],
    bags: Int[Tensor, "tokens chosen"],
) -> Float[Tensor, "tokens d"]:
    if table.is_cuda and table.dtype == torch.bfloat16:
        # torch has no backward of an embedding bag in bf16 there.
        return _bag_sum(weights.float(), table.float(), bags).bfloat16()
    y = F.embedding_bag(bags, table, per_sample_weights=weights, mode="sum")
    differentiate_twice(
        y,
        # The bag's own operation has the weights in one row.
        lambda table, w: (w.view(bags.shape)[..., None] * table[bags]).sum(1),
        table,
        weights.flatten(),
    )
    return y


class _ExpertScores(torch.autograd.Function):
    """Pulls x back through the bag to its weights; the bag is linear, so any weights will do."""

    @staticmethod
    def forward(ctx, x, down, bags):
        ctx.save_for_backward(x, down, bags)
        zeros = x.new_zeros(bags.shape)
        return _pull_back(lambda weights: _bag_sum(weights, down, bags), zeros, x)

    @staticmethod
    def backward(ctx, *grads):
        x, down, bags = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiate(
                lambda x, down: (x[:, None] * down[bags]).sum(-1), (x, down), grads
            ), None
        grad_down = _pull_back(lambda table: _bag_sum(grads[0], table, bags), down, x)
        return _bag_sum(grads[0], down, bags), grad_down, None


def _pull_back(form: Callable[[Tensor], Tensor], at: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of a form at a point, for a gradient of what it returns.

    Whatever saves tensors in a way of its own, as checkpoints of activations do, is left out.
    """
    if torch.compiler.is_compiling():
        return vjp(form, at)[1](grad)[0]
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_keep, _keep):
        at = at.detach().requires_grad_()
        return torch.autograd.grad(form(at), at, grad)[0]


def _keep(x: Tensor) -> Tensor:
    return x
