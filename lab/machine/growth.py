"""How the memory of a call grows with rows: measured on few, extended to many or long ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from lab.machine.allocation import OverLimitError, measure_peak
from lab.machine.memory import DoesNotFitError, format_bytes, measure_free_memory
from tasks.base import Batch, Task, count_rows

TOKENS, MANY_TOKENS = 2**10, 2**13
"""Tokens of the smaller of two measured calls: at first, and where memory may be too small. From
several thousand on, losses and state spaces work block by block, and take less for each token."""
DOUBT = 4
"""If this many times an estimate exceeds the free memory, larger calls are measured: what long rows
take grows with the square of their length, which short ones hardly show."""
STRAIGHT = 1.1
"""How many times as steep a line may become when lengths double, and still count as straight."""
FRAGMENTS = 1.35
"""Bytes a process takes for each byte of activations: freed pieces do not fit what comes next.
Ten measurements were between 1.1 and 1.7 (LOG.md)."""
FORWARD_FRAGMENTS = 1.2
"""The same without gradients, for which less is kept: 1.0 to 1.6 in 19 evaluations and audits."""


@dataclass(frozen=True)
class Growth:
    """The bytes that the tensors of a call take at a time: fixed + rows · (line · t + square · t²).

    Attributes:
        fixed: whatever the rows.
        line: for each token.
        square: for each pair of tokens of a row; 0 where rows of a single length were measured.
        seq_len: tokens of a row.
    """

    fixed: float
    line: float
    square: float
    seq_len: int

    @property
    def per_row(self) -> float:
        """Bytes of each row."""
        return self._count_row(self.seq_len)

    def count_bytes(self, rows: int) -> float:
        """Return what some rows take."""
        return self.fixed + rows * self.per_row

    def count_fitting_rows(self, limit: float) -> int:
        """Return how many rows fit into a number of bytes."""
        return max(0, int((limit - self.fixed) / max(self.per_row, 1)))

    def find_longest_row(self, limit: float) -> int:
        """Return how many tokens a single row may have within a number of bytes."""
        low, high = 0, self.seq_len
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.fixed + self._count_row(middle) <= limit else (low, middle)
            )
        return low

    def _count_row(self, length: int) -> float:
        return self.line * length + self.square * length**2


@dataclass(frozen=True)
class Demand:
    """The bytes that a process needs at once to work on rows.

    Attributes:
        fixed: beside the rows, such as weights.
        rows: worked on at a time.
        growth: of the tensors, with the rows.
        fragments: bytes a process takes for each byte of these.
    """

    fixed: float
    rows: int
    growth: Growth
    fragments: float = FORWARD_FRAGMENTS

    @property
    def total(self) -> int:
        """All of it."""
        return int(self.fixed + self.fragments * self.growth.count_bytes(self.rows))

    def count_fitting_rows(self, limit: float) -> int:
        """Return how many rows may be worked on at a time within a number of bytes."""
        return self.growth.count_fitting_rows((limit - self.fixed) / self.fragments)

    def find_longest_row(self, limit: float) -> int:
        """Return how many tokens a row may have within a number of bytes, if there is only one."""
        return self.growth.find_longest_row((limit - self.fixed) / self.fragments)


@runtime_checkable
class MemoryEstimate(Protocol):
    """What some work is estimated to take."""

    @property
    def total(self) -> int:
        """Bytes."""
        ...


AnyEstimate = TypeVar("AnyEstimate", bound=MemoryEstimate)


@dataclass(frozen=True)
class Closest(Generic[AnyEstimate]):
    """An estimate from measurements as large as were needed and possible.

    Attributes:
        estimate: None if even the small calls were stopped.
        bytes: what the work takes.
        stopped: whether a measured call was stopped at these bytes, so that it takes more.
    """

    estimate: AnyEstimate | None
    bytes: int
    stopped: bool

    def __str__(self) -> str:
        size = format_bytes(self.bytes)
        return f"{size} or more" if self.stopped else f"about {size}"


def estimate_closely(
    estimate: Callable[[int, float], AnyEstimate], task: Task, bound: int
) -> Closest[AnyEstimate]:
    """Estimate what work on rows takes: on larger calls, too, where memory may be too small.

    Args:
        estimate: returns what it takes, given the tokens of a measured call, and a limit.
        task: whose rows are.
        bound: bytes that may be taken.
    """
    found, asked = None, 0
    for tokens in (TOKENS, MANY_TOKENS):
        try:
            found = estimate(tokens, bound)
        except OverLimitError as error:
            return Closest(found, max(asked, error.bytes), True)
        asked = found.total
        if DOUBT * asked <= bound and task.seq_len <= MANY_TOKENS:
            break
    return Closest(found, asked, False)


def check_demand(
    what: str, task: Task, estimate: Callable[[int, float], Demand], free: int | None = None
) -> None:
    """Check that memory holds some work on rows of a task.

    Args:
        what: the work, in words.
        task: whose rows are.
        estimate: as for `estimate_closely`.
        free: bytes that may be taken; None: what is free.

    Raises:
        DoesNotFitError: naming the row length, the bytes, and the longest row that fits.
    """
    bound = measure_free_memory() if free is None else free
    found = estimate_closely(estimate, task, bound)
    if found.bytes <= bound:
        return
    length = 0
    if found.estimate is not None and not found.stopped:
        length = found.estimate.find_longest_row(bound)
    advice = f"rows of {length:,} tokens would fit" if length else "shorter rows may fit"
    raise DoesNotFitError(
        f"seq_len={task.seq_len}: does not fit in memory: {what} takes {found}, "
        f"{format_bytes(bound)} are free; {advice}"
    )


def measure_growth(
    task: Task,
    rows: int,
    call: Callable[[Batch], object],
    *,
    tokens: int = TOKENS,
    limit: float = math.inf,
    whole: bool = False,
    measure: Callable[[Callable[[], object], float], int] = measure_peak,
) -> Growth:
    """Measure what a call takes on few rows of a task.

    Args:
        task: what rows are of.
        rows: as many as there will be.
        call: takes a batch.
        tokens: of the smaller of two measured batches, which has no more rows than the work.
        limit: bytes that a measured call may take.
        whole: whether long rows are measured as they are; otherwise three of their ends are.
        measure: returns the bytes of a call, or refuses those above a limit.

    Raises:
        OverLimitError: when a measured call takes more than the limit.
    """
    length = task.seq_len

    def measure_rows(size: int) -> int:
        return measure(lambda: call(task.batch(size=size)), limit)

    if length > 4 * tokens and not whole:
        row = task.batch(size=1)
        lengths = (tokens, 2 * tokens, 4 * tokens)
        return _extend(
            lengths, [measure(lambda n=n: call(row.cut(n)), limit) for n in lengths], length
        )
    some = count_rows(tokens, length, most=rows)
    if rows <= 2 * some:
        return Growth(0.0, measure_rows(rows) / rows / length, 0.0, length)
    measure_rows(1)  # what a first call imports and keeps belongs to no row
    found = measure_rows(some), measure_rows(2 * some)
    per_row = max(0.0, (found[1] - found[0]) / some)
    return Growth(max(0.0, found[0] - some * per_row), per_row / length, 0.0, length)


def _extend(lengths: Sequence[int], found: Sequence[int], length: int) -> Growth:
    """Return how what parts of a row were found to take goes on to the length of the whole.

    What is hardly curved goes on straight: far away, a little that a block adds would count much.
    """
    steep = [(found[i + 1] - found[i]) / (lengths[i + 1] - lengths[i]) for i in (0, 1)]
    if steep[1] <= STRAIGHT * steep[0]:
        line = max(0.0, steep[1])
        return Growth(max(0.0, found[-1] - line * lengths[-1]), line, 0.0, length)
    square, line, fixed = np.polyfit(lengths, found, 2)
    return Growth(max(0.0, fixed), max(0.0, line), max(0.0, square), length)
