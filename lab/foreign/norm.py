"""The norm of a foreign layer, with its scale and what it has normalised at hook points."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.foreign.mixer import ForeignPart, is_close
from lab.hooks import HookPoint
from lab.ops.precision import promote

EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""What norms call the number that keeps their scale from 0."""


class ForeignNorm(ForeignPart):
    """A foreign RMSNorm or LayerNorm. [b t d] → [b t d].

        y = gain ⊙ (x − m) / scale + shift,    scale = √(mean (x − m)² + eps)

    Hook points, as in the lab's own norm: `hook_scale` [b t 1]; `hook_normalized` [b t d],
    (x − m) / scale. Both are in fp32 at least. Without hooks on them, the library computes y.

    Args:
        module: the foreign norm, which has parameters.
        eps: keeps the scale from 0.
        centered: whether m is the mean of x, as in a LayerNorm; otherwise it is 0.
    """

    def __init__(self, module: nn.Module, eps: float, centered: bool):
        super().__init__(module)
        self.eps, self.centered = eps, centered
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    @property
    def shift(self) -> Float[Tensor, " d"]:
        """What the norm returns for zeros."""
        like = next(self.module.parameters())
        return self.module.forward(torch.zeros_like(like))

    @property
    def gain(self) -> Float[Tensor, " d"]:
        """What multiplies (x − m) / scale; libraries store it in several forms, like 1 + weight."""
        like = next(self.module.parameters())
        d = len(like)
        # Its mean is 0, and no entry is.
        probe = torch.where(torch.arange(d) < d // 2, d - d // 2, -(d // 2)).to(like)
        normalized = self._center(probe) / self._compute_scale(self._center(probe))
        return (self.module.forward(probe) - self.shift) / normalized.to(like)

    def norm_part(
        self, part: Float[Tensor, "*axes d"], scale: Float[Tensor, "*axes 1"]
    ) -> Float[Tensor, "*axes d"]:
        """Return the norm of a part of x at the scale of the whole; no part has the shift."""
        return self._center(part) / scale * self.gain

    def recompute(self, x: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes d"]:
        """Return the norm of x by its formula; scale and normalized x pass their hook points."""
        return self._pass(x)[0] * self.gain + self.shift

    def watch(self) -> None:
        """Let what the foreign norm computes pass the hook points from now on."""
        self.module.register_forward_hook(self._pass_points)

    def _center(self, x: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes d"]:
        wide = x.to(promote(x))
        return wide - wide.mean(-1, keepdim=True) if self.centered else wide

    def _compute_scale(self, centered: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes 1"]:
        return (centered.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def _pass_points(self, module: nn.Module, args: Any, returned: Any) -> Any:
        watched = self.hook_scale.active or self.hook_normalized.active
        # Fused norms of flash-linear-attention may return the residual stream, too.
        if not (watched and isinstance(returned, Tensor)):
            return None
        normalized, changed = self._pass(args[0])
        if not (changed or torch.is_grad_enabled()):
            return None
        return (normalized * self.gain + self.shift).to(returned.dtype)

    def _pass(self, x: Float[Tensor, "*axes d"]) -> tuple[Float[Tensor, "*axes d"], bool]:
        """Return the normalized x after its hook points, and whether a hook may have changed it."""
        centered = self._center(x)
        scale = self._compute_scale(centered)
        passed_scale = self.hook_scale(scale)
        normalized = centered / passed_scale
        passed = self.hook_normalized(normalized)
        if scale.is_inference():  # changes in place are not counted there
            return passed, True
        edits = scale._version + normalized._version
        return passed, passed_scale is not scale or passed is not normalized or edits > 0


@torch.no_grad()
def find_type(norm: nn.Module, like: Float[Tensor, " d"]) -> Literal["RMS", "LN"] | None:
    """Return whether a norm subtracts the mean, which shows in inputs that differ by a constant.

    Args:
        norm: any norm; an identity is none.
        like: of the shape, dtype and device of an input.
    """
    if isinstance(norm, nn.Identity):
        return None
    if isinstance(norm, ForeignNorm):
        return "LN" if norm.centered else "RMS"
    probe = torch.linspace(-1, 2, len(like)).to(like)[None, None]
    return "LN" if is_close(norm(probe + 1), norm(probe)) else "RMS"


def watch_norm(module: nn.Module) -> nn.Module:
    """Return a foreign norm with hook points; as it is where its formula is another one, or where
    it cannot be called with its input alone.
    """
    eps = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    like = next(module.parameters(), None)
    if eps is None or like is None or like.ndim != 1:
        return module
    probe = torch.linspace(0, 1, len(like)).to(like)[None, None]
    with torch.no_grad():
        try:
            expected = module.forward(probe)
        except Exception:  # it reads more than its input, such as a gate
            return module
        for centered in (False, True):
            norm = ForeignNorm(module, eps, centered)
            if is_close(norm.recompute(probe), expected):
                norm.watch()
                return norm
    return module
