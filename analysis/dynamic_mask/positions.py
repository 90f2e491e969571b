"""Positions of a row, grouped into marks of a figure and into bands that are recorded."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from analysis.dynamic_mask.masks import MaskedHead

MARKS = 256
"""Maximum number of marks along the positions of a row; in longer rows, neighbours share a mark."""


def find_width(seq_len: int) -> int:
    """Return how many positions share a mark."""
    return math.ceil(seq_len / MARKS)


def sum_neighbours(values: Float[np.ndarray, "*n t"], width: int) -> Float[np.ndarray, "*n bins"]:
    """Return sums over groups of `width` neighbours; the last group may be smaller."""
    return np.add.reduceat(values, np.arange(0, values.shape[-1], width), axis=-1)


NAMED = 3
"""Maximum number of heads that a sentence names."""


def pick_most(heads: Sequence[MaskedHead], key: Callable[[MaskedHead], float]) -> list[MaskedHead]:
    """Return the `NAMED` heads with the largest keys, in their own order."""
    by_key = sorted(range(len(heads)), key=lambda i: key(heads[i]), reverse=True)
    return [heads[i] for i in sorted(by_key[:NAMED])]
