"""Peak memory of a piece of work, and the machine's peak at matrix products."""

import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lab.bench.ratio import time_median
from lab.machine.memory import give_back_freed_memory

MATRIX_SIZE = 2048


def keep_pages() -> None:
    """Make malloc keep freed pages, as it does in training.

    A training step frees tensors larger than a batch; after that, malloc no longer returns pages to
    the system each time.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8).fill_(0)


def measure_peak_mib(work: Callable[[], Callable[[], object]]) -> float:
    """Return by how many MiB a new process grows at most while it computes (Linux).

    Args:
        work: a picklable function that prepares and returns the call to measure; the memory of
            the preparation is not counted.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _measure(work: Callable[[], Callable[[], object]], answer: Connection) -> None:
    call = work()
    give_back_freed_memory()  # or what the preparation has freed would be taken again, uncounted
    before = _read_status_mib("VmRSS")
    # Writing 5 resets the high-water mark to the current size (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    call()
    answer.send(_read_status_mib("VmHWM") - before)


def _read_status_mib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure_matrix_peak(dtype: torch.dtype) -> float:
    """Return this machine's floating-point operations per second in a large matrix product."""
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE).to(dtype) for _ in range(2))
    return 2 * MATRIX_SIZE**3 / time_median(lambda: a @ b)
