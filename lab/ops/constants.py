"""Constant tensors that an accelerator keeps."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def keep_on_accelerator(compute: Callable[..., T]) -> Callable[..., T]:
    """Compute anew at each call on a CPU, and once for each device and sizes elsewhere.

    Copying to an accelerator waits for it, and a CUDA graph cannot record it, but reads what is
    kept as long as it is replayed.
    """
    keep = lru_cache(maxsize=None)(compute)

    def find(device: torch.device, *sizes: Any) -> T:
        return compute(device, *sizes) if device.type == "cpu" else keep(device, *sizes)

    return find
