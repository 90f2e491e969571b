"""Norms and MLPs of other libraries with the lab's hook points."""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.foreign.mixer import ForeignPart, is_close
from lab.foreign.parts import Recorder, Seen, is_norm, is_same
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


class Inner(NamedTuple):
    """The parts of an MLP that have hook points.

    Attributes:
        activation: a module without parameters; None if there is none.
        linear: the map whose output multiplies the activation's; None if the MLP has no such.
        down: the last map.
        width: d_ff, the channels that it reads.
    """

    activation: nn.Module | None
    linear: nn.Module | None
    down: nn.Module
    width: int


class ForeignMLP(ForeignPart):
    """A foreign MLP. [b t d] → [b t d].

    Hook points, as in the lab's own MLP, all [b t d_ff]: `hook_pre`, what the activation is applied
    to; `hook_pre_linear`, what its output is multiplied by, if a map of its own computes that;
    `hook_post`, what the last map reads.

    Args:
        module: the foreign MLP.
        inner: its parts.
    """

    def __init__(self, module: nn.Module, inner: Inner):
        super().__init__(module)
        self.width = inner.width
        self.hook_pre = None if inner.activation is None else HookPoint()
        self.hook_pre_linear = None if inner.linear is None else HookPoint()
        self.hook_post = HookPoint()
        if inner.activation is not None:
            inner.activation.register_forward_pre_hook(self._pass_pre)
        if inner.linear is not None:
            inner.linear.register_forward_hook(self._pass_linear)
        inner.down.register_forward_pre_hook(self._pass_post)

    def _pass_pre(self, activation: nn.Module, args: Any) -> Any:
        assert self.hook_pre is not None
        return (self.hook_pre(args[0]), *args[1:])

    def _pass_linear(self, linear: nn.Module, args: Any, returned: Tensor) -> Tensor:
        assert self.hook_pre_linear is not None
        return self.hook_pre_linear(returned)

    def _pass_post(self, down: nn.Module, args: Any) -> Any:
        return (self.hook_post(args[0]), *args[1:])


@torch.no_grad()
def watch_mlp(module: nn.Module, x: Float[Tensor, "b t d"]) -> nn.Module:
    """Return a foreign MLP with hook points; as it is if it is made otherwise, as experts are, or
    if it cannot be called with its input alone.

    Args:
        module: the MLP.
        x: an input to try it on.
    """
    recorder = Recorder(module.named_children())
    try:
        module.forward(x)
    except Exception:  # it reads more than its input, as BLOOM's reads the residual stream
        return module
    finally:
        recorder.stop()
    inner = _read(x, recorder.seen)
    return module if inner is None else ForeignMLP(module, inner)


def _read(x: Float[Tensor, "b t d"], calls: list[Seen]) -> Inner | None:
    """Return an MLP's parts from the calls of its children."""
    maps = [seen for seen in calls if next(seen.part.parameters(), None) is not None]
    if not maps or maps[-1].returned.shape != x.shape or is_norm(maps[-1].part):
        return None
    down, post = maps[-1].part, maps[-1].given
    if is_same(post, x) or post.shape[:-1] != x.shape[:-1]:
        return None
    # Dropout, which does nothing here, returns what it reads.
    applied = [
        seen
        for seen in calls
        if next(seen.part.parameters(), None) is None
        and seen.returned.shape == post.shape
        and not is_same(seen.given, seen.returned)
    ]
    if len(applied) != 1:
        return Inner(None, None, down, post.shape[-1])
    factors = [
        seen.part
        for seen in maps
        if seen.returned.shape == post.shape and is_close(applied[0].returned * seen.returned, post)
    ]
    return Inner(applied[0].part, factors[0] if factors else None, down, post.shape[-1])
