"""A number and how sure it is over rows of a batch; many at once, of which one will be worst."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from analysis.scoring import Scored
from analysis.statistics.intervals import bootstrap

FLIPS = 2000
"""Flips of signs behind a p."""
SURE = 0.05
"""The p below which a change is seen."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval over rows of the batch, and what chance makes of it."""

    value: float
    low: float
    high: float
    chance: float


def estimate_ratio(
    over: Shaped[Tensor, " b"], under: Shaped[Tensor, " b"], chance: float, rng: np.random.Generator
) -> Estimate:
    """Estimate Σ over / Σ under, its interval by resampling rows; rows with a NaN are left out."""
    both = torch.stack([over.double(), under.double()], 1).cpu().numpy()
    both = both[~np.isnan(both).any(1)]
    if len(both) > 1 and both[:, 1].any() and not both[:, 0].any():
        # Nothing but zeros to draw from.
        return Estimate(0.0, 0.0, 0.0, chance)
    return Estimate(divide_sums(both), *bootstrap(both, rng, statistic=divide_sums), chance)


def divide_sums(both: Float[np.ndarray, "n 2"]) -> float:
    """Return the quotient of two sums; NaN over zero."""
    over, under = both.sum(0)
    return float(over / under) if under else math.nan


def estimate_accuracy(answered: Scored, chance: float, rng: np.random.Generator) -> Estimate:
    """Estimate the share of right answers."""
    return estimate_ratio(*sum_by_row(answered, answered.right), chance, rng)


def sum_by_row(answered: Scored, values: Shaped[Tensor, " q"]) -> tuple[Tensor, Tensor]:
    """Return the sum of values and the count of scored positions of each row."""
    n_rows = int(answered.rows.max()) + 1
    sums = torch.bincount(answered.rows, values.double(), minlength=n_rows)
    return sums, torch.bincount(answered.rows, minlength=n_rows)


def westfall_young(
    changes: Float[np.ndarray, "b n"], rng: np.random.Generator
) -> Float[np.ndarray, " n"]:
    """Return how often the lowest of n changes is as low as each is, where none is a change at all.

        z_j = Σ_b c_bj / √(Σ_b c_bj²),   p_j = P(min_i z_i ≤ z_j)

    under random signs of the rows, the same for all n, whose correlation so stays. Whichever of
    them is picked after the fact, p < 0.05 comes in at most 5 % of cases where no change is real.

    Args:
        changes: of each row, one of n changes; without one they are as often up as down.
        rng: draws the signs.

    Returns:
        p in (0, 1]; with b rows at least about 2^−b, so that few tell nothing.

    Source: Westfall and Young, Resampling-Based Multiple Testing (1993), § 2.
    """
    size = np.sqrt(np.square(changes).sum(0))
    unit = changes / np.where(size > 0, size, 1.0)
    signs = rng.choice((-1.0, 1.0), (FLIPS, len(changes)))
    # What is equal but for rounding counts as equal.
    lowest = (signs @ unit).min(1) - 1e-9
    return (1 + (lowest[:, None] <= unit.sum(0)).sum(0)) / (1 + FLIPS)


def thin(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many of the items, evenly spaced, the first and the last among them.

    Raises:
        ValueError: for `most` below 1.
    """
    if most < 1:
        raise ValueError(f"{most=} must be at least 1")
    kept = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[i] for i in kept]
