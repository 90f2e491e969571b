"""Positions of a row, grouped into marks of a figure and into bands that are recorded."""

import math

import numpy as np
from jaxtyping import Float

MARKS = 256
"""Maximum number of marks along the positions of a row; in longer rows, neighbours share a mark."""
BANDS = 8
"""Number of equal bands of positions."""


def find_width(seq_len: int) -> int:
    """Return how many positions share a mark."""
    return math.ceil(seq_len / MARKS)


def sum_neighbours(values: Float[np.ndarray, "*n t"], width: int) -> Float[np.ndarray, "*n bins"]:
    """Return sums over groups of `width` neighbours; the last group may be smaller."""
    return np.add.reduceat(values, np.arange(0, values.shape[-1], width), axis=-1)
