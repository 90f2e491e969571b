"""What tests replace in the lab, so that a run measures neither for seconds nor for its choices."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

REPLACED = {
    "lab.training.speed.SECONDS": 0.0,
    # A run in precision "auto" then has nothing to choose, and the same bits everywhere.
    "torch.cpu._is_avx512_bf16_supported": lambda: False,
    "torch.cpu._is_amx_tile_supported": lambda: False,
}


def replace_measurements(replace: Callable[[Any, str, object], object] = setattr) -> None:
    """Replace them all in this process.

    Args:
        replace: sets an attribute of a module.
    """
    for path, value in REPLACED.items():
        module, _, name = path.rpartition(".")
        replace(import_module(module), name, value)


def behave_as_in_tests() -> None:
    """Let this process, which pytest did not set up, measure nothing and poison its memory."""
    import torch

    replace_measurements()
    torch.use_deterministic_algorithms(True)
