"""How the cost of a task's rows grows with their length and with the vocabulary."""

from collections.abc import Callable
from dataclasses import fields

from lab.bench.peak import keep_pages
from lab.bench.ratio import Ratio, time_in_turns
from tasks import TASKS
from tasks.base import Task

ROWS = 64
TIMES_LONGER, TIMES_LARGER = 4, 16
KEPT = 0.75
"""Ratio of costs that counts as equal, because larger tensors do not fit the caches."""


def measure() -> list[Ratio]:
    """Time each task's rows against longer rows, and against rows of a larger vocabulary."""
    keep_pages()
    found = []
    for name in TASKS:
        task = TASKS[name]()
        longer = task.replace(seq_len=TIMES_LONGER * task.seq_len)
        short, long = time_in_turns(_make_generator(task), _make_generator(longer))
        each, other = (
            1e9 * seconds / ROWS / of.seq_len for seconds, of in ((short, task), (long, longer))
        )
        where = f"{name}, T = {task.seq_len} against {longer.seq_len}"
        found.append(Ratio(where, each, other, "ns/token", each / other, KEPT))
        if any(f.init and f.name == "vocab_size" for f in fields(task)):
            larger = task.replace(vocab_size=TIMES_LARGER * task.vocab_size)
            few, many = time_in_turns(_make_generator(task), _make_generator(larger))
            where = f"{name}, V = {task.vocab_size} against {larger.vocab_size}"
            found.append(
                Ratio(where, 1e6 * few / ROWS, 1e6 * many / ROWS, "µs/row", few / many, KEPT)
            )
    return found


def _make_generator(task: Task) -> Callable[[], object]:
    return lambda: task.batch(size=ROWS)
