"""Rows: the lab's counters against the usual NumPy generator, and how their cost grows."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from itertools import count
from subprocess import Popen

import numpy as np
import torch
from torch import Tensor

from lab.bench.peak import keep_pages
from lab.bench.ratio import Contest, Ratio, time_in_turns
from tasks import TASKS
from tasks.base import Task
from tasks.mqar import MQAR
from tasks.reader import BatchReader

ROWS, PAPER_ROWS = 512, 32
"""Rows of a batch, and rows a step in the paper."""
TASK = MQAR(seq_len=2048, n_pairs=512, vocab_size=8192)
TIMES_LONGER, TIMES_LARGER = 4, 16
KEPT = 0.75
"""Ratio of costs that counts as equal, because larger tensors do not fit the caches."""


def draw_usual_rows(task: MQAR, size: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets [b t] as Zoology's `multiquery_ar` does, row by row."""
    n_pairs, half = task.pair_count, task.vocab_size // 2
    context, n_slots = 2 * n_pairs, (task.seq_len - 2 * n_pairs) // 2
    weights = np.arange(1, n_slots + 1) ** (task.power - 1)
    weights /= weights.sum()
    # The usual code calls NumPy's legacy generator.
    choice = partial(np.random.choice, size=n_pairs, replace=False)
    keys = np.stack([choice(np.arange(1, half)) for _ in range(size)])
    values = np.stack([choice(np.arange(half, task.vocab_size)) for _ in range(size)])
    slots = np.stack([choice(n_slots, p=weights) for _ in range(size)])

    inputs = np.zeros((size, task.seq_len), dtype=np.int64)
    inputs[:, :context:2], inputs[:, 1:context:2] = keys, values
    np.put_along_axis(inputs, context + 2 * slots, keys, axis=1)
    targets = np.full_like(inputs, -100)
    np.put_along_axis(targets, context + 2 * slots, values, axis=1)
    rows = torch.from_numpy(inputs)
    empty = rows == 0
    rows[empty] = torch.randint(task.vocab_size, rows.shape)[empty]
    return rows, torch.from_numpy(targets)


def measure() -> Iterator[Ratio]:
    """Time hard MQAR's rows from both, also beside a busy process; then each task's growth.

    Both use one thread, so another process that keeps a core busy costs neither much. The paper's
    small batches are read in order, as in training.
    """
    keep_pages()
    usual = partial(_prepare_usual, ROWS)
    sizes, both = f"mqar, T = {TASK.seq_len}, K = {TASK.pair_count}", (ROWS, ROWS)
    batches = partial(_prepare_batches, ROWS)
    yield from Contest(f"{sizes}, {ROWS} at a time", batches, usual, 15.0, 0.5, both).measure()
    read = f"{sizes}, read {PAPER_ROWS} at a time"
    yield from Contest(read, _prepare_reader, usual, 15.0, rows=both).measure()
    with Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"]) as busy:
        try:
            ours, theirs = partial(_prepare_batches, ROWS // 2), partial(_prepare_usual, PAPER_ROWS)
            name, rows = f"{sizes}, beside a busy process", (ROWS // 2, PAPER_ROWS)
            yield from Contest(name, ours, theirs, 15.0, rows=rows).measure(15)
        finally:
            busy.kill()
    for name in TASKS:
        yield from _measure_growth(name)


def _prepare_batches(rows: int) -> Callable[[], object]:
    starts = count(step=rows)
    TASK.batch(size=1)
    return lambda: TASK.batch(start=next(starts), size=rows)


def _prepare_usual(rows: int) -> Callable[[], object]:
    return lambda: draw_usual_rows(TASK, rows)


def _prepare_reader() -> Callable[[], object]:
    reader, starts = BatchReader(TASK, size=PAPER_ROWS), count(step=PAPER_ROWS)
    return lambda: [reader.read(next(starts)) for _ in range(ROWS // PAPER_ROWS)]


def _measure_growth(name: str, rows: int = 64) -> Iterator[Ratio]:
    """Time a task's rows against longer rows, and against rows of a larger vocabulary."""

    def draw(task: Task) -> Callable[[], object]:
        return lambda: task.batch(size=rows)

    task = TASKS[name]()
    longer = task.replace(seq_len=TIMES_LONGER * task.seq_len)
    seconds = time_in_turns(draw(task), draw(longer))
    each, other = (
        1e9 * taken / rows / of.seq_len for taken, of in zip(seconds, (task, longer), strict=True)
    )
    where = f"{name}, T = {task.seq_len} against {longer.seq_len}"
    yield Ratio(where, each, other, "ns/token", each / other, KEPT)
    if any(f.init and f.name == "vocab_size" for f in fields(task)):
        larger = task.replace(vocab_size=TIMES_LARGER * task.vocab_size)
        few, many = (1e6 * t / rows for t in time_in_turns(draw(task), draw(larger)))
        where = f"{name}, V = {task.vocab_size} against {larger.vocab_size}"
        yield Ratio(where, few, many, "µs/row", few / many, KEPT)
