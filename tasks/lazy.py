"""Import torch on first use, so that a task's options can be listed without it.

>>> from tasks.lazy import Tensor, torch
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "torch" in sys.modules:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)  # found without this function from now on
            return value

    class _TensorType(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torch.Tensor)

    class Tensor(metaclass=_TensorType):
        """What annotations name in place of `torch.Tensor`."""

    torch = _Torch()

__all__ = ["Tensor", "torch"]
