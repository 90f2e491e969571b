"""A schedule: an option of a task that changes while a model is trained."""

import math
from dataclasses import dataclass

from tasks.bounds import check_kind, check_range
from tasks.lazy import Tensor

FLOAT_STAGES = 11
"""Values that a schedule between two fractions takes, both ends among them."""
LARGEST = 2**50
"""Larger than any option of a task, and than the rows of any training."""


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
        ValueError: for what is not a number of a size that tasks have, or rows below 1.
    """

    first: int | float
    last: int | float
    rows: int

    def __post_init__(self):
        for name, kind in (("first", float), ("last", float), ("rows", int)):
            check_kind(name, getattr(self, name), kind)
            check_range(name, getattr(self, name), -LARGEST, LARGEST)
        if self.rows < 1:
            raise ValueError(f"rows={self.rows}: must be ≥ 1")

    @property
    def stages(self) -> int:
        """Number of stages, counted without listing their values."""
        if self.first == self.last:
            return 1
        whole = self._list_whole()
        return FLOAT_STAGES if whole is None else len(whole) + 1

    @property
    def values(self) -> tuple[int | float, ...]:
        """The value of each stage; check first that there are not too many `stages`."""
        first, last = self.first, self.last
        if first == last:
            return (last,)
        whole = self._list_whole()
        if whole is not None:
            return (*whole, last)
        steps = FLOAT_STAGES - 1
        return tuple(round(first + (last - first) * i / steps, 12) for i in range(FLOAT_STAGES))

    def _list_whole(self) -> range | None:
        """Return the values before the last one of a schedule between whole numbers."""
        first, last = self.first, self.last
        if not (isinstance(first, int) and isinstance(last, int)):
            return None
        step = math.gcd(first, last) if first and last else 1
        return range(first, last, step if last > first else -step)

    def find_stage(self, numbers: Tensor) -> Tensor:
        """Return which of `values` the training rows with these numbers take, int64 [b]."""
        numbers = numbers.clamp(max=self.rows - 1)
        return (numbers * self.stages).div(self.rows, rounding_mode="floor")
