"""Estimates with 95 % intervals over rows of a batch, and p values of the lowest of many."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from analysis.scoring import Scored
from analysis.statistics.intervals import bootstrap_ratio
from analysis.words import format_ends

FLIPS = 2000
"""Random sign flips behind a p value."""
SURE = 0.05
"""The p value below which a change counts."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval over rows of the batch, and its value by chance."""

    value: float
    low: float
    high: float
    chance: float

    @property
    def points(self) -> str:
        """A change of a share in points, with its interval: "+1.0 points [+0.5, +1.5]"."""
        ends = format_ends(self.low, self.high, lambda end: f"{100 * end:+.1f}")
        return f"{100 * self.value:+.1f} points {ends}"


def estimate_ratio(
    over: Shaped[Tensor, " b"], under: Shaped[Tensor, " b"], chance: float, rng: np.random.Generator
) -> Estimate:
    """Estimate Σ over / Σ under with an interval by resampling rows; rows with NaN are left out."""
    both = torch.stack([over.double(), under.double()], 1).cpu().numpy()
    both = both[~np.isnan(both).any(1)]
    if len(both) > 1 and both[:, 1].any() and not both[:, 0].any():
        # Every resample would be 0.
        return Estimate(0.0, 0.0, 0.0, chance)
    return Estimate(divide_sums(both), *bootstrap_ratio(both, rng), chance)


def divide_sums(both: Float[np.ndarray, "n 2"]) -> float:
    """Return the quotient of the sums of two columns; NaN if the second is 0."""
    over, under = both.sum(0)
    return float(over / under) if under else math.nan


def estimate_accuracy(answered: Scored, chance: float, rng: np.random.Generator) -> Estimate:
    """Estimate the share of right answers."""
    return estimate_ratio(*sum_by_row(answered, answered.right), chance, rng)


def sum_by_row(answered: Scored, values: Shaped[Tensor, " q"]) -> tuple[Tensor, Tensor]:
    """Return for each row the sum of values and the number of scored positions."""
    n_rows = int(answered.rows.max()) + 1
    sums = torch.bincount(answered.rows, values.double(), minlength=n_rows)
    return sums, torch.bincount(answered.rows, minlength=n_rows)


def westfall_young(
    changes: Float[np.ndarray, "b n"], rng: np.random.Generator
) -> Float[np.ndarray, " n"]:
    """Return p values of n changes, corrected for picking the lowest of them afterwards.

        z_j = Σ_b c_bj / √(Σ_b c_bj²),   p_j = P(min_i z_i ≤ z_j)

    under random signs of the rows. The signs are the same for all n changes, which keeps their
    correlation. If no change is real, any p < 0.05 occurs in at most 5 % of cases.

    Args:
        changes: n changes in each row; without an effect they are as often up as down.
        rng: draws the signs.

    Returns:
        p in (0, 1]; with b rows at least about 2^−b, so a few rows cannot show anything.

    Source: Westfall and Young, Resampling-Based Multiple Testing (1993), § 2.
    """
    size = np.sqrt(np.square(changes).sum(0))
    unit = changes / np.where(size > 0, size, 1.0)
    signs = rng.choice((-1.0, 1.0), (FLIPS, len(changes)))
    # Values that differ only by rounding count as equal.
    lowest = (signs @ unit).min(1) - 1e-9
    return (1 + (lowest[:, None] <= unit.sum(0)).sum(0)) / (1 + FLIPS)


def thin(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` of the items, evenly spaced, with the first and the last.

    Raises:
        ValueError: for `most` below 1.
    """
    if most < 1:
        raise ValueError(f"{most=} must be at least 1")
    kept = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[i] for i in kept]
