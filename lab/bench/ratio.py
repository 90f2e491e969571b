"""Two ways of doing the same work, measured in turns: what every speed claim of the lab is."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from lab.bench.peak import measure_peak_mib


@dataclass(frozen=True)
class Ratio:
    """One line of a benchmark: how much better the lab's way is than the other.

    Attributes:
        name: what was measured, with its sizes.
        ours: our number, in `unit`.
        theirs: the other's number, in `unit`.
        unit: "rows/s" (more is better), "ms" or "MiB" (less is better), …
        ratio: how many times better ours is (> 1: better).
        target: the ratio that was promised; None where a number is only reported.
        note: a further remark in a line.
    """

    name: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    target: float | None
    note: str = ""

    @classmethod
    def of_costs(
        cls, name: str, ours: float, theirs: float, unit: str, target: float | None, note: str = ""
    ) -> "Ratio":
        """Return the ratio of two costs, of which less is better."""
        return cls(name, ours, theirs, unit, theirs / ours, target, note)

    @property
    def reached(self) -> bool:
        """Whether the promise is kept."""
        return self.target is None or self.ratio >= self.target

    def to_markdown(self) -> str:
        """Return a row of a table: name, ours, theirs, unit, ratio, target, note."""
        promised = "" if self.target is None else f"{self.target:.3g}"
        missed = "" if self.reached else ", missed"
        cells = (
            self.name,
            f"{self.ours:,.4g}",
            f"{self.theirs:,.4g}",
            self.unit,
            f"{self.ratio:.3g}",
            promised + missed,
            self.note,
        )
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    def __str__(self) -> str:
        promised = "" if self.target is None else f" (promised {self.target:.3g})"
        missed = "" if self.reached else "  MISSED"
        note = f"; {self.note}" if self.note else ""
        return (
            f"{self.name}: {self.ours:,.4g} against {self.theirs:,.4g} {self.unit}, "
            f"{self.ratio:.3g} ×{promised}{missed}{note}"
        )


Prepare = Callable[[], Callable[[], object]]
"""Prepares a piece of work, and returns the call that does it."""


@dataclass(frozen=True)
class Contest:
    """The lab's way and another way of doing the same work.

    Attributes:
        name: what is done, with its sizes.
        ours: prepares the lab's call.
        theirs: prepares the other.
        promised: how many times as fast the lab's is promised to be; None: no promise.
        memory: how many times less memory it is promised to take; None: memory is not measured.
            Both must be picklable then, as fresh processes measure it.
        rows: what a call of each does; None: milliseconds are reported, not rows a second.
    """

    name: str
    ours: Prepare
    theirs: Prepare
    promised: float | None = None
    memory: float | None = None
    rows: tuple[int, int] | None = None

    def measure(self, repeats: int = 7) -> Iterator[Ratio]:
        """Yield the ratio of times, taken in turns, and that of peak memory."""
        ours, theirs = time_in_turns(self.ours(), self.theirs(), repeats)
        if self.rows is None:
            yield Ratio.of_costs(self.name, 1e3 * ours, 1e3 * theirs, "ms", self.promised)
        else:
            fast, slow = self.rows[0] / ours, self.rows[1] / theirs
            yield Ratio(self.name, fast, slow, "rows/s", fast / slow, self.promised)
        if self.memory is not None:
            peaks = measure_peak_mib(self.ours), measure_peak_mib(self.theirs)
            yield Ratio.of_costs(f"{self.name}: peak memory", *peaks, "MiB", self.memory)


def time_in_turns(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 7
) -> tuple[float, float]:
    """Return the median seconds of each call, timed in turns so that noise affects both alike."""
    first, second = take_medians((ours, theirs), repeats)
    return first, second


def take_medians(
    calls: Sequence[Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the median seconds of each call by a clock, in turns and after a first call of all."""
    for call in calls:
        call()
    return [median(taken) for taken in take_turns(calls, repeats, clock)]


def take_turns(
    calls: Sequence[Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Return the seconds of each call by a clock, `repeats` times, taken in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            began = clock()
            call()
            taken.append(clock() - began)
    return times
