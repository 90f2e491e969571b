"""Holding a computation to the precision of what it is given, whatever autocast would take."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def disable_autocast(x: Tensor) -> torch.autocast:
    """Return a context in which products keep their operands' dtypes, on x's device."""
    return torch.autocast(x.device.type, enabled=False)


def keep_dtypes(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of tensors multiply in their own dtypes: sums that compound need them.

    Its first argument that is a tensor says on which device autocast is to be off.
    """

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        given = next(z for z in (*args, *options.values()) if isinstance(z, Tensor))
        with disable_autocast(given):
            return function(*args, **options)

    return call
