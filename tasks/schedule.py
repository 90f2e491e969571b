"""A schedule: an option of a task that changes while a model is trained."""

import math
from dataclasses import dataclass

from tasks.lazy import Tensor

FLOAT_STAGES = 11
"""Values that a schedule between two fractions takes, both ends among them."""


@dataclass(frozen=True)
class Schedule:
    """An option that goes from one value to another over the first training rows.

    It moves in stages of as many rows each: whole numbers by their greatest common divisor, so
    that 64 → 256 takes multiples of 64 (from or to 0 it moves by one); fractions in ten steps.
    Rows of other splits all have the last value.

    Attributes:
        first: value of row 0.
        last: value of row `rows` − 1 and of all later ones.
        rows: training rows that it takes, ≥ 1.

    Raises:
        ValueError: for a number that is not finite, or rows below 1.
    """

    first: int | float
    last: int | float
    rows: int

    def __post_init__(self):
        for name in ("first", "last"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: must be finite")
        if self.rows < 1:
            raise ValueError(f"rows={self.rows}: must be ≥ 1")

    @property
    def values(self) -> tuple[int | float, ...]:
        """The value of each stage."""
        first, last = self.first, self.last
        if first == last:
            return (last,)
        if isinstance(first, int) and isinstance(last, int):
            step = math.gcd(first, last) if first and last else 1
            return (*range(first, last, step if last > first else -step), last)
        steps = FLOAT_STAGES - 1
        return tuple(round(first + (last - first) * i / steps, 12) for i in range(FLOAT_STAGES))

    def find_stage(self, numbers: Tensor) -> Tensor:
        """Return which of `values` the training rows with these numbers take, int64 [b]."""
        stages = len(self.values)
        return (numbers.clamp(max=self.rows - 1) * stages).div(self.rows, rounding_mode="floor")
