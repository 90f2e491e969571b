"""The suite at a glance: what each task separates, how large it is, and what a row costs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from lab.config import TrainConfig
from lab.lengthening import list_stages
from tasks import TASKS
from tasks.base import IGNORE, Task

ROWS = 64
"""Rows of a batch that is timed."""
BATCHES = 5


@dataclass(frozen=True)
class Size:
    """How large a task is.

    Attributes:
        seq_len: tokens a row.
        vocab_size: tokens that there are.
    """

    seq_len: int
    vocab_size: int


@dataclass(frozen=True)
class Entry:
    """A task as it comes, without an option given.

    Attributes:
        name: of its command.
        separates: what it tells apart.
        size: at the defaults.
        scored: positions a row that count, the mean over a batch.
        chance: accuracy of a uniform guess over the legal answers, in [0, 1].
        microseconds: what a row costs on this machine now, the median of a few batches.
        presets: sizes by name.
        grows: options that lengthening scales while a model is trained; none: it does not grow.
        grows_from: tokens a row that training starts with at the defaults.
        why_fixed: why the task does not grow; empty where it does.
    """

    name: str
    separates: str
    size: Size
    scored: float
    chance: float
    microseconds: float
    presets: dict[str, Size]
    grows: tuple[str, ...]
    grows_from: int
    why_fixed: str


def surveyed() -> Iterator[Entry]:
    """Look at every task of the suite, and time it."""
    for kind in TASKS.values():
        task = kind()
        yield Entry(
            name=task.name,
            separates=task.separates,
            size=_size(task),
            scored=(task.batch(size=ROWS).targets != IGNORE).sum().item() / ROWS,
            chance=task.chance,
            microseconds=_microseconds(task),
            presets={name: _size(kind(**preset.options)) for name, preset in kind.presets.items()},
            grows=task.grows,
            grows_from=list_stages(task, TrainConfig(lengthen=True))[0].task.seq_len,
            why_fixed=task.why_fixed,
        )


def _size(task: Task) -> Size:
    return Size(task.seq_len, task.vocab_size)


def _microseconds(task: Task) -> float:
    """Return the time a row takes, links left out as in training."""
    times = []
    for i in range(BATCHES + 1):
        began = time.perf_counter()
        task.batch(start=i * ROWS, size=ROWS)
        times.append(time.perf_counter() - began)
    return 1e6 * median(times[1:]) / ROWS
