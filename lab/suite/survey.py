"""A survey of the suite: what each task separates, its size, and the time that a row takes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from lab.config import LAB_SHORTEST_LEN, TrainConfig
from lab.lengthening import list_stages
from tasks import TASKS
from tasks.base import Task

ROWS = 64
"""Rows of each batch that is timed."""
BATCHES = 5
GROWING = TrainConfig(lengthen=True, shortest_len=LAB_SHORTEST_LEN)
"""What the lab's protocol says of row lengths."""


@dataclass(frozen=True)
class Size:
    """How large a task is.

    Attributes:
        seq_len: tokens a row.
        vocab_size: number of different tokens; 0 where rows are vectors.
        d_input: numbers of a vector; 0 where rows are tokens.
    """

    seq_len: int
    vocab_size: int
    d_input: int = 0


@dataclass(frozen=True)
class TaskSummary:
    """A task at its defaults.

    Attributes:
        name: also of its command.
        separates: what the task tells apart.
        size: rows and vocabulary.
        scored: scored positions a row, the mean over a batch.
        chance: accuracy of a uniform guess over the legal answers, in [0, 1].
        microseconds: time a row takes on this machine, the median of a few batches.
        presets: sizes by name.
        seconds: of training on one thread after which the preset small was learned; None if not
            known.
        grows: options that lengthening scales; none if the task does not grow.
        grows_from: tokens a row at which training starts.
        why_fixed: why the task does not grow; empty where it does.
    """

    name: str
    separates: str
    size: Size
    scored: float
    chance: float
    microseconds: float
    presets: dict[str, Size]
    seconds: int | None
    grows: tuple[str, ...]
    grows_from: int
    why_fixed: str


def survey_tasks() -> Iterator[TaskSummary]:
    """Yield every task of the suite, timed."""
    for kind in TASKS.values():
        task = kind()
        yield TaskSummary(
            name=task.name,
            separates=task.separates,
            size=_measure_size(task),
            scored=task.batch(size=ROWS).scored.sum().item() / ROWS,
            chance=task.chance,
            microseconds=_time_row(task),
            presets={
                name: _measure_size(kind(**preset.options)) for name, preset in kind.presets.items()
            },
            seconds=kind.presets["small"].seconds if "small" in kind.presets else None,
            grows=task.grows,
            grows_from=list_stages(task, GROWING)[0].task.seq_len,
            why_fixed=task.why_fixed,
        )


def _measure_size(task: Task) -> Size:
    return Size(task.seq_len, task.vocab_size, task.sizes.get("d_input", 0))


def _time_row(task: Task) -> float:
    """Return the time in microseconds that a row takes, without links, as in training."""
    times = []
    for i in range(BATCHES + 1):
        began = time.perf_counter()
        task.batch(start=i * ROWS, size=ROWS)
        times.append(time.perf_counter() - began)
    return 1e6 * median(times[1:]) / ROWS
