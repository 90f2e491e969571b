"""Functions that torch.compile must leave alone."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def keep_eager(function: Function) -> Function:
    """Make torch.compile call a function as it is, where it would trace through it.

    `torch.compiler.disable` does the same, but imports torch._dynamo at once, which takes a
    second. Here nothing is imported: without torch._dynamo nothing has been compiled yet.
    """
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args)
            disabled = torch.compiler.disable(function)
        return disabled(*args)

    return cast(Function, call)
