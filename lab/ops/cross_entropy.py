"""Cross-entropy of a linear head, in row blocks, so that the logits of a block stay in cache.

    logits = hidden Wᵀ,   loss = mean_q [logsumexp(logits_q) − logits_{q,target}]

The gradient of a block's logits, softmax − one-hot over q, is contracted with the head and with the
hidden states in the forward pass, while the block is there, so that neither [q v] logits nor
their gradient are ever held whole; the 1/q waits for the backward pass.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.derivatives import differentiate, needs_plain
from lab.ops.precision import promote

BLOCK_BYTES, GPU_BLOCK_BYTES = 4 * 2**20, 256 * 2**20
"""Logits of one block, in bytes: on a CPU the fastest of 1 to 32 MiB on two cores (LOG.md); on a
GPU, whose kernels want much work each, a small share of its memory."""


def linear_cross_entropy(
    hidden: Float[Tensor, "q d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, " q"],
    *,
    padded: bool = False,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the mean loss in nats, differentiable, and how many targets have the largest logit.

    The products run in the inputs' dtype, the softmax in fp32 at least. A target that ties for the
    largest logit counts as right; use an argmax where that could matter.

    Args:
        hidden: hidden states.
        weight: of the head.
        targets: the right answers.
        padded: whether a target below 0 stands for a position that counts for nothing. Nothing
            waits for a GPU to learn how many count.

    Raises:
        ValueError: when no position is scored, or the widths differ.
    """
    if hidden.shape[0] == 0:
        raise ValueError("hidden has 0 rows: at least one position must be scored")
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden is {hidden.shape[1]} wide, weight {weight.shape[1]}")
    if needs_plain():
        return naive_linear_cross_entropy(hidden, weight, targets)
    loss, correct = _LinearCrossEntropy.apply(hidden, weight, targets, padded)
    return loss, correct


@torch.no_grad()
def linear_argmax(hidden: Float[Tensor, "q d"], weight: Float[Tensor, "v d"]) -> Int[Tensor, " q"]:
    """Return the token with the largest logit at each position, the first one where some tie."""
    block = _count_block_rows(weight, hidden.element_size())
    return torch.cat([(some @ weight.T).argmax(-1) for some in hidden.split(block)])


@torch.no_grad()
def linear_answers(
    hidden: Float[Tensor, "q d"], weight: Float[Tensor, "v d"], targets: Int[Tensor, " q"]
) -> tuple[Float[Tensor, " q"], Int[Tensor, " q"]]:
    """Return each position's loss in nats and the token with its largest logit, the first of ties.

    Each logit is computed once. Precisions are those of `linear_cross_entropy`.
    """
    high = torch.promote_types(hidden.dtype, torch.float32)
    losses, answers = hidden.new_empty(len(hidden), dtype=high), torch.empty_like(targets)
    block = _count_block_rows(weight, high.itemsize)
    for start in range(0, len(hidden), block):
        rows = slice(start, start + block)
        logits = (hidden[rows] @ weight.T).to(high)
        largest, answers[rows] = logits.max(-1)
        right = logits.gather(-1, targets[rows, None]).squeeze(-1)
        total = logits.sub_(largest[:, None]).exp_().sum(-1)
        losses[rows] = largest - right + total.log()
    return losses, answers


def naive_linear_cross_entropy(
    hidden: Float[Tensor, "q d"], weight: Float[Tensor, "v d"], targets: Int[Tensor, " q"]
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """The obvious form, with all logits at once: the reference for `linear_cross_entropy`."""
    logits = (hidden @ weight.T).to(promote(hidden))
    loss = F.cross_entropy(logits, targets.where(targets >= 0, -100))
    return loss, (logits.argmax(-1) == targets).sum()


def _count_block_rows(weight: Tensor, itemsize: int) -> int:
    block_bytes = GPU_BLOCK_BYTES if weight.is_cuda else BLOCK_BYTES
    return max(1, block_bytes // (weight.shape[0] * itemsize))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, padded):
        n_rows = hidden.shape[0]
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        counts = (targets >= 0)[:, None] if padded else None
        given, targets = targets, targets.clamp(min=0) if padded else targets
        high = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=high) if needs_weight else None
        loss = hidden.new_zeros((), dtype=high)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        block = _count_block_rows(weight, high.itemsize)
        for start in range(0, n_rows, block):
            rows = slice(start, start + block)
            some, target = hidden[rows], targets[rows, None]
            logits = (some @ weight.T).to(high)
            largest = logits.amax(-1, keepdim=True)
            right = logits.gather(-1, target)
            p = torch.softmax(logits, -1)
            # The largest probability is 1/Σexp(logits − largest): no second pass, no underflow.
            losses, hits = largest - right - p.amax(-1, keepdim=True).log(), right >= largest
            if counts is not None:
                losses, hits = losses.where(counts[rows], 0), hits & counts[rows]
            loss += losses.sum()
            correct += hits.sum()
            if needs_hidden or needs_weight:
                p.scatter_add_(-1, target, p.new_full((1, 1), -1.0).expand_as(target))
                if counts is not None:
                    p.mul_(counts[rows])
                grad_logits = p.to(hidden.dtype)
                if grad_hidden is not None:
                    torch.mm(grad_logits, weight, out=grad_hidden[rows])
                if grad_weight is not None and grad_weight.dtype == some.dtype:
                    grad_weight.addmm_(grad_logits.T, some)
                elif grad_weight is not None:
                    grad_weight += grad_logits.T @ some
        ctx.save_for_backward(hidden, weight, given, grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.counted = n_rows if counts is None else counts.sum()
        ctx.mark_non_differentiable(correct)
        return loss / ctx.counted, correct

    @staticmethod
    def backward(ctx, grad_loss, _):  # type: ignore[override]
        hidden, weight, targets, grad_hidden, grad_weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (
                *differentiate(
                    lambda hidden, weight: naive_linear_cross_entropy(hidden, weight, targets)[0],
                    (hidden, weight),
                    (grad_loss,),
                ),
                None,
                None,
            )
        share = grad_loss / ctx.counted
        if grad_hidden is not None:
            grad_hidden = grad_hidden * share.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * share).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None
