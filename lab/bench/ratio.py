"""A measured ratio between the lab's way and another way of doing the same work."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median


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
        promised = "" if self.target is None else f"{self.target:g}"
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
        promised = "" if self.target is None else f" (promised {self.target:g})"
        missed = "" if self.reached else "  MISSED"
        note = f"; {self.note}" if self.note else ""
        return (
            f"{self.name}: {self.ours:,.4g} against {self.theirs:,.4g} {self.unit}, "
            f"{self.ratio:.3g} ×{promised}{missed}{note}"
        )


def time_in_turns(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 7
) -> tuple[float, float]:
    """Return the median seconds of each call, timed in turns so that noise affects both alike."""
    ours()
    theirs()
    taken = take_turns((ours, theirs), repeats)
    return median(taken[0]), median(taken[1])


def take_turns(
    calls: Sequence[Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Return the seconds of each call by a clock, `repeats` times, taken in turns.

    `prepare` is called before each of them, and not timed.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            prepare()
            began = clock()
            call()
            taken.append(clock() - began)
    return times


def time_median(call: Callable[[], object], repeats: int = 7) -> float:
    """Return the median seconds of a call, after one that is not counted."""
    return time_in_turns(call, lambda: None, repeats)[0]
