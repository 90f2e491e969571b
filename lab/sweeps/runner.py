"""Running the cells of a sweep in several processes, each with one thread on a CPU."""

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.files import RunError
from lab.sweeps.folder import ENDED, CellFolder
from lab.sweeps.sweep import Cell, Sweep
from lab.sweeps.workers import POLL, Trainer
from lab.training.signals import catch_interrupts


def run_cells(
    sweep: Sweep,
    out: Path,
    start: Callable[[int, threading.Event], Sequence[Trainer]],
    *,
    groups: Sequence[Sequence[Cell]] | None = None,
    workers: int = 1,
    max_minutes: float | None = None,
    skip: Callable[[Cell], bool] = lambda cell: False,
    on_begin: Callable[[Cell], None] = lambda cell: None,
    on_end: Callable[[Cell, CellFolder, str | None], None] = lambda cell, folder, error: None,
    on_wait: Callable[[], None] = lambda: None,
) -> signal.Signals | None:
    """Run the unfinished cells in order; return the signal that stopped this, if any.

    The error of a cell that fails is written to its folder. Other cells go on, and the cell is
    tried again next time. SIGINT and SIGTERM are passed to the running cells, which write a
    checkpoint and go on next time.

    Args:
        sweep: the cells.
        out: the folder that holds the cells' folders.
        start: returns what trains cells, given how many and what is set when they are to stop,
            such as `lab.sweeps.workers.start_processes` of a command.
        groups: the cells by the process that trains them together; None: each on its own.
        workers: groups at a time.
        max_minutes: most minutes of a cell in total; None: no limit.
        skip: whether a cell's result is already known from elsewhere.
        on_begin: called with a cell before it is trained.
        on_end: called with every cell after it has run or was found finished, and its error.
        on_wait: called a few times a second while cells are trained.

    Raises:
        ValueError: for workers below 1, or minutes not above 0.
    """
    check_limits(workers, max_minutes)
    stop, telling = threading.Event(), threading.Lock()
    waiting = deque([(cell,) for cell in sweep.cells] if groups is None else groups)

    def end(cell: Cell, folder: CellFolder, error: str | None) -> None:
        with telling:
            on_end(cell, folder, error)

    def work(worker: Trainer) -> None:
        try:
            while waiting and not stop.is_set():
                try:
                    group = waiting.popleft()
                except IndexError:  # another worker was faster
                    return
                todo = {}
                for cell in group:
                    folder = CellFolder(out / cell.name)
                    if skip(cell):
                        continue
                    if is_finished(cell, folder, max_minutes):
                        end(cell, folder, None)
                        continue
                    todo[folder] = cell
                    with telling:
                        on_begin(cell)
                _train(todo, worker, max_minutes, end)
        finally:
            worker.close()

    with catch_interrupts() as interrupted, ThreadPoolExecutor(workers) as pool:
        try:
            busy = [pool.submit(work, worker) for worker in start(workers, stop)]
            while not all(future.done() for future in busy) and not interrupted():
                time.sleep(POLL)
                with telling:
                    on_wait()
        finally:
            # Also on a second signal, which raises here: no process is left behind.
            stop.set()
        for future in busy:
            future.result()
        return interrupted()


def check_limits(workers: int, max_minutes: float | None) -> None:
    """Check the number of workers and of minutes.

    Raises:
        ValueError: for workers below 1, or minutes not above 0.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: must be ≥ 1")
    if max_minutes is not None and not max_minutes > 0:  # NaN too
        raise ValueError(f"max_minutes={max_minutes}: must be > 0")


def is_finished(cell: Cell, folder: CellFolder, max_minutes: float | None) -> bool:
    """Whether a cell needs no more training or evaluation."""
    status = folder.find_status()
    if status not in (*ENDED, "out of time"):
        return False
    if status == "out of time" and (max_minutes is None or folder.read_minutes() < max_minutes):
        return False
    return status == "diverged" or {found["seq_len"] for found in folder.read_lengths()} >= {
        *cell.lengths
    }


def _train(
    cells: Mapping[CellFolder, Cell],
    worker: Trainer,
    max_minutes: float | None,
    on_end: Callable[[Cell, CellFolder, str | None], None],
) -> None:
    """Train cells together, and record the minutes of each and its error."""
    began, left = time.monotonic(), dict(cells)

    def end(folder: CellFolder, error: str | None) -> None:
        cell = left.pop(folder)
        with contextlib.suppress(RunError):
            folder.note((time.monotonic() - began) / 60 / len(cells), error)
        on_end(cell, folder, error)

    for folder, cell in cells.items():
        try:
            folder.claim(cell)
        except (RunError, OSError) as failure:
            end(folder, str(failure))
    minutes = max_minutes
    if max_minutes is not None and left:
        # A cell that is out of minutes must still be evaluated, which takes a step first.
        minutes = max(1e-3, max_minutes - max(folder.read_minutes() for folder in left))
    try:
        worker.train(list(left), minutes, end)
        failed = None
    except (RunError, OSError) as failure:
        failed = str(failure)
    for folder in list(left):  # those that were stopped
        end(folder, failed)
