"""Lanes: models of one shape computed at once, each with its own weights and rows.

`torch.func.vmap` runs code that was written for one model on a lane axis. Functions that it cannot
run, or runs slowly, say with `over_lanes` how to compute all lanes. Axis letter of this file,
besides the package's: z lane.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
Rule = Callable[[Callable[..., Any], list[bool], list[Any]], Any]
"""Computes a function for all lanes. It gets the function, which arguments have a lane axis, and
the arguments, those with one having it first; its results have it first too."""

_depth = 0


def map_lanes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for all lanes: of arguments and results whose first axis is the lanes'.

    Raises:
        RuntimeError: when it is called, for code that vmap cannot run, such as random draws.
    """

    def call(*args: Any) -> Any:
        global _depth
        _depth += 1
        try:
            return torch.func.vmap(function)(*args)
        finally:
            _depth -= 1

    return call


def over_lanes(rule: Rule) -> Callable[[Function], Function]:
    """Let a rule compute a function inside `map_lanes`; elsewhere the function is unchanged.

    No tensor may be within another argument.
    """

    def decorate(function: Function) -> Function:
        parameters = signature(function)

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if not _depth:
                return function(*args, **options)
            given = parameters.bind(*args, **options)
            given.apply_defaults()
            return _OverLanes.apply(rule, function, *given.args)

        return cast(Function, call)

    return decorate


def fold_rows(function: Callable[..., Any], batched: list[bool], args: list[Any]) -> Any:
    """Compute all lanes' rows as one batch: for a function of rows that do not mix.

    The first axis of each tensor is b. A tensor that all lanes share must not have it, and is
    passed as it is.
    """
    n_lanes = len(args[batched.index(True)])
    folded = (arg.flatten(0, 1) if has else arg for has, arg in zip(batched, args, strict=True))
    result = function(*folded)
    if isinstance(result, tuple):
        return tuple(part.unflatten(0, (n_lanes, -1)) for part in result)
    return result.unflatten(0, (n_lanes, -1))


def take_turns(function: Callable[..., Any], batched: list[bool], args: list[Any]) -> Tensor:
    """Compute one lane after another: for functions whose work is in few, large operations."""
    n_lanes = len(args[batched.index(True)])
    return torch.stack(
        [
            function(*(arg[z] if has else arg for has, arg in zip(batched, args, strict=True)))
            for z in range(n_lanes)
        ]
    )


class _OverLanes(torch.autograd.Function):
    """Hands a rule the lanes' tensors themselves; autograd sees what it computes with them."""

    @staticmethod
    def forward(rule: Rule, function: Callable[..., Any], *args: Any) -> Any:
        # No argument has a lane axis: all lanes would compute the same.
        return function(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("tensors that all lanes share have no gradient")

    @staticmethod
    def vmap(info, in_dims, rule, function, *args):  # type: ignore[override]
        dims = in_dims[2:]
        placed = [
            arg if dim is None else arg.movedim(dim, 0) for arg, dim in zip(args, dims, strict=True)
        ]
        result = rule(function, [dim is not None for dim in dims], placed)
        return result, tuple(0 for _ in result) if isinstance(result, tuple) else 0
