"""The RMSNorm before every layer and before the head, with hook points."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.ops.norm import rms_norm
from lab.ops.precision import promote


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
