"""RMSNorm in few operations, forward and backward.

    y = w ⊙ x r,   r = 1 / √(mean x² + eps),   dx = r (w ⊙ dy) − x r³ mean(x ⊙ w ⊙ dy)

On a CPU torch computes and differentiates it step by step, in twice as many passes over x. On a GPU
torch has a kernel for it, and torch.compile makes one.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lab.ops.derivatives import differentiate, needs_plain


def rms_norm(
    x: Float[Tensor, "*axes d"], weight: Float[Tensor, " d"], eps: float | None = None
) -> Float[Tensor, "*axes d"]:
    """Return weight · x / √(mean x² + eps) over the last axis.

    Args:
        x: what is normalised.
        weight: the gain of each channel.
        eps: None is the machine epsilon of x's dtype.

    Source: `torch.nn.functional.rms_norm`, which is the reference.
    """
    slow = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not slow or torch.compiler.is_compiling() or needs_plain():
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        # A norm reads x once, where the mean of squares writes them first. Each row's is its own.
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        r.div_(len(weight)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        ctx.eps = eps
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiate(
                lambda x, weight: F.rms_norm(x, weight.shape, weight, ctx.eps), (x, weight), (grad,)
            ), None
        x, rows = (z.reshape(-1, len(weight)) for z in (x, grad))
        r = r.view(-1, 1)
        along = rows * x
        # A product with a vector sums over channels faster than a sum, and autocast leaves it.
        towards = torch.mv(along, weight)[:, None].mul_(r**3).div_(-len(weight))
        to_x = (rows * r).mul_(weight).addcmul_(x, towards)
        return to_x.view_as(grad), along.mul_(r).sum(0), None
