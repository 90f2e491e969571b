"""The RMSNorm before every layer and before the head, with hook points."""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.ops.derivatives import differentiate, needs_plain
from lab.ops.precision import promote


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


@runtime_checkable
class PartsNorm(Protocol):
    """A norm of a sum that can be taken apart. Its point `hook_scale` is the sum's scale.

    The norms of the parts add up to the norm of the sum, less what the norm returns for zeros.
    """

    @property
    def hook_scale(self) -> HookPoint:
        """The hook point of the scale [b t 1]."""
        ...

    def norm_part(self, part: Tensor, scale: Tensor, /) -> Tensor:
        """Return the norm of a part [… d] at the scale of the whole [… 1]."""
        ...


class HookedRMSNorm(nn.RMSNorm):
    """x ← factor · weight · x / rms(x), with rms(x) = √(mean x² + eps). [b t d] → [b t d].

    Hook points, as in TransformerLens: `hook_scale` [b t 1], rms(x); `hook_normalized` [b t d],
    x / rms(x). Both are in fp32 at least, and are computed only for hooks.

    Args:
        d_model: width d.
        factor: fixed factor. For the last norm 1/√d makes the first logits of a tied table of std
            1 have a standard deviation of 1, where they would have √d: T5 scales its tied head so
            (Raffel et al. 2020).
    """

    def __init__(self, d_model: int, factor: float = 1.0):
        super().__init__(d_model)
        self.factor = factor
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    @property
    def gain(self) -> Float[Tensor, " d"]:
        """What multiplies x / rms(x): factor · weight."""
        return self.weight if self.factor == 1 else self.weight * self.factor

    def norm_part(
        self, part: Float[Tensor, "*axes d"], scale: Float[Tensor, "*axes 1"]
    ) -> Float[Tensor, "*axes d"]:
        """Return the norm of a part of x at the scale of the whole."""
        return part / scale * self.gain

    def forward(self, x: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes d"]:
        """Return the scaled norm."""
        if not (self.hook_scale.active or self.hook_normalized.active):
            return rms_norm(x, self.gain, self.eps)
        wide = x.to(promote(x))
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        scale = self.hook_scale((wide.square().mean(-1, keepdim=True) + eps).sqrt())
        return (self.hook_normalized(wide / scale) * self.gain).to(x.dtype)
