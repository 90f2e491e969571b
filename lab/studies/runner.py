"""Running the cells of a study, each in its own process with one thread."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.files import RunError
from lab.studies.folder import ENDED, CellFolder
from lab.studies.study import Cell, Study
from lab.training.signals import catch_interrupts

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
POLL = 0.2
"""Seconds between checks of a cell's process."""
TAIL = 20
"""Last lines of a process's output that are searched for its error."""


def run_cells(
    study: Study,
    out: Path,
    command: Sequence[str],
    *,
    workers: int = 1,
    max_minutes: float | None = None,
    skip: Callable[[Cell], bool] = lambda cell: False,
    on_begin: Callable[[Cell], None] = lambda cell: None,
    on_end: Callable[[Cell, CellFolder], None] = lambda cell, folder: None,
) -> signal.Signals | None:
    """Run the unfinished cells in order; return the signal that stopped this, if any.

    The error of a cell that fails is written to its folder. Other cells go on, and the cell is
    tried again next time. SIGINT and SIGTERM are passed to the running cells, which write a
    checkpoint and go on next time.

    Args:
        study: the cells.
        out: the folder that holds the cells' folders.
        command: the command that trains a cell; it gets the folder and `--max-minutes`.
        workers: cells at a time.
        max_minutes: most minutes of a cell in total; None: no limit.
        skip: whether a cell's result is already known from elsewhere.
        on_begin: called with a cell before it is trained.
        on_end: called with every cell after it has run or was found finished.

    Raises:
        ValueError: for workers below 1, or minutes not above 0.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: must be ≥ 1")
    if max_minutes is not None and not max_minutes > 0:  # NaN too
        raise ValueError(f"max_minutes={max_minutes}: must be > 0")
    stop = threading.Event()
    telling = threading.Lock()

    def work(cell: Cell) -> None:
        folder = CellFolder(out / cell.name)
        if stop.is_set():
            return
        if not is_finished(cell, folder, max_minutes):
            with telling:
                on_begin(cell)
            _train(cell, folder, command, max_minutes, stop)
        with telling:
            on_end(cell, folder)

    with catch_interrupts() as interrupted, ThreadPoolExecutor(workers) as pool:
        try:
            waiting = [pool.submit(work, cell) for cell in study.cells if not skip(cell)]
            while not all(future.done() for future in waiting) and not interrupted():
                time.sleep(POLL)
        finally:
            # Also on a second signal, which raises here: no process is left behind.
            stop.set()
        for future in waiting:
            future.result()
        return interrupted()


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
    cell: Cell,
    folder: CellFolder,
    command: Sequence[str],
    max_minutes: float | None,
    stop: threading.Event,
) -> None:
    """Train a cell in its own process, and record its minutes and its error."""
    began = time.monotonic()
    try:
        folder.claim(cell)
        arguments = [*command, str(folder.path)]
        if max_minutes is not None:
            # A cell that is out of minutes must still be evaluated, which takes a step first.
            left = max(1e-3, max_minutes - folder.read_minutes())
            arguments += ["--max-minutes", str(left)]
        error = _call(arguments, folder.log, stop)
    except (RunError, OSError) as failure:
        error = str(failure)
    with contextlib.suppress(RunError):
        folder.note((time.monotonic() - began) / 60, error)


def _call(arguments: list[str], log: Path, stop: threading.Event) -> str | None:
    """Run a process to its end; return its error, or None if it succeeded or was stopped here."""
    with open(log, "a") as output:
        # In its own session, or else Ctrl-C in a terminal would reach it twice and kill it.
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,
        )
        asked = False
        while process.poll() is None:
            if stop.is_set() and not asked:
                process.send_signal(signal.SIGINT)
                asked = True
            time.sleep(POLL)
    if process.returncode == 0 or asked:
        return None
    lines = [line for line in log.read_text(errors="replace").splitlines()[-TAIL:] if line.strip()]
    said = lines[-1].removeprefix("Error: ") if lines else ""
    return f"exit code {process.returncode}: {said}"
