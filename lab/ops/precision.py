"""Control the precision of a computation, whatever autocast would choose."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

P = ParamSpec("P")
R = TypeVar("R")


def promote(x: Tensor) -> torch.dtype:
    """Return x's dtype, or fp32 if x is less precise: for sums whose errors compound."""
    return torch.promote_types(x.dtype, torch.float32)


def disable_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products on x's device keep their operands' dtypes."""
    # The meta device, on which shapes alone are computed, has no autocast.
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def keep_dtypes(function: Callable[P, R]) -> Callable[P, R]:
    """Disable autocast inside a function, on the device of its first tensor argument."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        given = next(z for z in (*args, *options.values()) if isinstance(z, Tensor))
        with disable_autocast(given):
            return function(*args, **options)

    return call


def call_promoted(module: nn.Module, z: Tensor) -> Tensor:
    """Return module(z) with its parameters in z's dtype, which may be wider than their own."""
    cast = {name: weight.to(z.dtype) for name, weight in module.named_parameters()}
    return functional_call(module, cast, (z,))
