"""The MLP of a foreign layer, with what its activation reads and what its last map reads."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.foreign.mixer import ForeignPart, is_close
from lab.foreign.parts import Recorder, Seen, is_norm, is_same
from lab.hooks import HookPoint


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
