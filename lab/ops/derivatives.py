"""Plain forms, where a fast form has no derivative.

A fast form computes its own gradient, which is no part of a graph: a second derivative through it
would be wrong without an error. So where a gradient is to be differentiated again, that of the
plain form is returned in its place. The transforms of torch.func and torch.export cannot look into
a fast form at all, and get the plain one from the start.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.ops.precision import disable_autocast


def needs_plain() -> bool:
    """Whether a transform of torch.func or torch.export is at work, which needs the plain form.

    Raises:
        RuntimeError: in torch.jit.trace.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    if torch._C._is_tracing():
        raise RuntimeError("torch.jit.trace cannot record the lab's layers: use torch.export")
    return torch._C._are_functorch_transforms_active()


def differentiate(
    form: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a plain form at its inputs, to be differentiated again.

    Args:
        form: computes a tensor, or several, from the inputs.
        inputs: those that need no gradient, or are None, get None.
        grads: the gradients of what the form returns; None is zero.
    """
    with torch.enable_grad(), disable_autocast(next(z for z in inputs if z is not None)):
        # Aliases, since an input may depend on another one.
        aliases = [z if z is None or not z.requires_grad else z.view_as(z) for z in inputs]
        outputs = form(*aliases)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                [z for z in aliases if z is not None and z.requires_grad],
                [g.to(y.dtype) for y, g in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        return tuple(next(found) if z is not None and z.requires_grad else None for z in aliases)


def differentiate_twice(y: Tensor, form: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Let y be differentiated twice, by its plain form, where torch's own operation has no graph.

    Args:
        y: what the operation returned.
        form: computes y from the inputs.
        inputs: of the operation that have gradients, its first ones and in its order.
    """
    if torch.compiler.is_compiling() or y.grad_fn is None:
        return

    def replace(to_inputs: tuple[Tensor | None, ...], to_y: tuple[Tensor | None, ...]) -> Any:
        # With fewer inputs y is not one operation's but several's, which have graphs.
        several = len(to_inputs) < len(inputs)
        if not torch.is_grad_enabled() or several or to_y[0] is None:
            return None
        return (*differentiate(form, inputs, to_y[:1]), *to_inputs[len(inputs) :])

    y.grad_fn.register_hook(replace)
