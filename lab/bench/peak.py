"""Peak memory of a piece of work, and the machine's peak at matrix products."""

import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lab.bench.ratio import median_seconds

MATRIX_SIZE = 2048


def keep_pages() -> None:
    """Let malloc keep the pages that are freed, as it does in training.

    A training step frees tensors larger than a batch's, after which pages are no longer handed
    back to the system each time.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8).fill_(0)


def peak_mib(work: Callable[[], Callable[[], object]]) -> float:
    """Return by how many MiB a fresh process grows, at most, while it computes (Linux).

    Args:
        work: a picklable function that prepares and returns the call to be measured; what the
            preparation needs is not counted.
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
    before = _status_mib("VmRSS")
    # 5 sets the high-water mark back to the present size (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    call()
    answer.send(_status_mib("VmHWM") - before)


def _status_mib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def matrix_product_peak(dtype: torch.dtype) -> float:
    """Return this machine's floating-point operations a second in a large matrix product."""
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE).to(dtype) for _ in range(2))
    return 2 * MATRIX_SIZE**3 / median_seconds(lambda: a @ b)
