"""How many items are made fewer: evenly, the first and the last among them."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many of the items, evenly spaced from the first to the last.

    Raises:
        ValueError: for fewer than one.
    """
    if most < 1:
        raise ValueError(f"{most=} must be at least 1")
    chosen = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[i] for i in chosen]
