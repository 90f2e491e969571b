"""The two clocks that training is timed with: the wall's and the processor's."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Spent:
    """Time by two clocks, in seconds.

    Attributes:
        wall: by the clock on the wall, waiting included.
        cpu: of the processor in all threads of this process.
    """

    wall: float
    cpu: float

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.wall - other.wall, self.cpu - other.cpu)

    def __truediv__(self, parts: int) -> "Spent":
        return Spent(self.wall / parts, self.cpu / parts)


def read_clocks() -> Spent:
    """Return the time since a moment that stays the same while the process lives."""
    return Spent(time.perf_counter(), time.process_time())
