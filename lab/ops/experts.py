"""Single-neuron experts: expert e reads x · down_e and writes a multiple of up_e.

The two halves are each other's adjoint: for tables of equal shape,

    ⟨expert_sum(w, table, i), x⟩ = ⟨w, expert_scores(x, table, i)⟩

so torch's embedding bag, which is `expert_sum`, serves both, forward and backward, and the chosen
rows [b t h k d] never exist. Memory beyond the arguments, results and table gradients is
O(b t (h k + d)).

Scoring every expert, x @ downᵀ, was the alternative. Forward and backward at 4,096 tokens on one
core, it takes 11 times as long at 128 experts for each chosen one (16,384, 8 heads of 16, d 256),
3 times at 32, and half as long at 8, where a step takes 12 ms: one path is kept.
"""

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import vjp


def expert_scores(
    x: Float[Tensor, "b t d"], down: Float[Tensor, "e d"], indices: Int[Tensor, "b t h k"]
) -> Float[Tensor, "b t h k"]:
    """Return x_t · down_e for each chosen expert e = indices[b, t, h, k], in the table's dtype.

    Differentiable once, in x and down.

    Args:
        x: what the experts read.
        down: the table of reading vectors.
        indices: int64, in 0 … e − 1; an expert may be chosen more than once.

    Source: the fourth and fifth steps of § Efficient Retrieval Experts.
    """
    bags = indices.flatten(2).flatten(0, 1)
    scores = _ExpertScores.apply(x.flatten(0, 1).to(down.dtype), down, bags)
    return scores.view(indices.shape)


def expert_sum(
    weights: Float[Tensor, "b t h k"], up: Float[Tensor, "e d"], indices: Int[Tensor, "b t h k"]
) -> Float[Tensor, "b t d"]:
    """Return Σ_hk weights · up_e over the chosen experts e, in the table's dtype.

    Differentiable once, in weights and up.

    Args:
        weights: what each chosen expert is multiplied by.
        up: the table of written vectors.
        indices: int64, in 0 … e − 1; an expert chosen twice is added twice.

    Source: the last step of § Efficient Retrieval Experts.
    """
    bags = indices.flatten(2).flatten(0, 1)
    y = _bag_sum(weights.to(up.dtype).view(bags.shape), up, bags)
    return y.unflatten(0, indices.shape[:2])


def naive_expert_scores(
    x: Float[Tensor, "b t d"], down: Float[Tensor, "e d"], indices: Int[Tensor, "b t h k"]
) -> Float[Tensor, "b t h k"]:
    """The obvious form, with every chosen row gathered: the oracle of `expert_scores`."""
    return einsum(x, down[indices], "b t d, b t h k d -> b t h k")


def naive_expert_sum(
    weights: Float[Tensor, "b t h k"], up: Float[Tensor, "e d"], indices: Int[Tensor, "b t h k"]
) -> Float[Tensor, "b t d"]:
    """The obvious form, with every chosen row gathered: the oracle of `expert_sum`."""
    return einsum(weights, up[indices], "b t h k, b t h k d -> b t d")


def _bag_sum(
    weights: Float[Tensor, "tokens chosen"],
    table: Float[Tensor, "e d"],
    bags: Int[Tensor, "tokens chosen"],
) -> Float[Tensor, "tokens d"]:
    return F.embedding_bag(bags, table, per_sample_weights=weights, mode="sum")


class _ExpertScores(torch.autograd.Function):
    """Pulls x back through the bag to its weights; the bag is linear, so any weights will do."""

    @staticmethod
    def forward(ctx, x, down, bags):
        ctx.save_for_backward(x, down, bags)
        zeros = x.new_zeros(bags.shape)
        pull_back = vjp(lambda weights: _bag_sum(weights, down, bags), zeros)[1]
        return pull_back(x)[0]

    @staticmethod
    def backward(ctx, *grads):
        x, down, bags = ctx.saved_tensors
        grad_x, pull_back = vjp(lambda table: _bag_sum(grads[0], table, bags), down)[:2]
        return grad_x, pull_back(x)[0], None
