"""Rows of hard MQAR: the lab's counters against the usual NumPy generator."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from subprocess import Popen

import numpy as np
import torch
from torch import Tensor

from lab.bench.peak import keep_pages, measure_peak_mib
from lab.bench.ratio import Ratio, take_turns
from tasks.mqar import MQAR
from tasks.reader import BatchReader

ROWS, BATCHES = 512, 8
PAPER_ROWS = 32
"""Rows a step in the paper."""
TASK = MQAR(seq_len=2048, n_pairs=512, vocab_size=8192)


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


def measure() -> list[Ratio]:
    """Time the same rows from both, and compare the lab's peak memory over many batches and one.

    Both use one thread, so another process that keeps a core busy costs neither much. The paper's
    small batches are read in order, as in training.
    """
    rows = BATCHES * ROWS
    calls = _prepare_batches(BATCHES), _prepare_reader(), lambda: draw_usual_rows(TASK, ROWS)
    take_turns(calls, 1)  # set-up
    ours, read, theirs = map(median, take_turns(calls, 7))
    usual_speed = ROWS / theirs
    sizes = f"mqar, T = {TASK.seq_len}, K = {TASK.pair_count}"
    many, one = (measure_peak_mib(partial(_prepare_batches, n)) for n in (BATCHES, 1))
    speeds = {f"{sizes}, {ROWS} at a time": ours, f"{sizes}, read {PAPER_ROWS} at a time": read}
    return [
        *(
            Ratio(what, rows / seconds, usual_speed, "rows/s", rows / seconds / usual_speed, 15.0)
            for what, seconds in speeds.items()
        ),
        _measure_beside_a_busy_process(),
        Ratio(f"mqar memory, {BATCHES} batches against one", many, one, "MiB", one / many, 0.5),
    ]


def _measure_beside_a_busy_process() -> Ratio:
    """Time batches while a process of the lowest priority keeps a core busy."""
    calls = (lambda: TASK.batch(size=ROWS // 2)), (lambda: draw_usual_rows(TASK, PAPER_ROWS))
    with Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"]) as busy:
        try:
            seconds = map(median, take_turns(calls, 15))
        finally:
            busy.kill()
    ours, theirs = (rows / s for rows, s in zip((ROWS // 2, PAPER_ROWS), seconds, strict=True))
    name = f"mqar, {ROWS // 2} at a time, beside a busy process"
    return Ratio(name, ours, theirs, "rows/s", ours / theirs, 15.0)


def _prepare_batches(n_batches: int) -> Callable[[], None]:
    """Return a call that generates batches in turn, after the set-up of the first one."""
    keep_pages()
    TASK.batch(size=1)

    def generate() -> None:
        for number in range(n_batches):
            TASK.batch(start=number * ROWS, size=ROWS)

    return generate


def _prepare_reader() -> Callable[[], None]:
    """Return a call that reads as many rows in small batches, each time further ones."""
    reader, first = BatchReader(TASK, size=PAPER_ROWS), count(step=BATCHES * ROWS)

    def read() -> None:
        start = next(first)
        for row in range(start, start + BATCHES * ROWS, PAPER_ROWS):
            reader.read(row)

    return read
