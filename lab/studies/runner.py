"""Running a study's cells, each in a process of its own with one thread."""

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
"""Seconds between looks at a cell's process."""
TAIL = 20
"""Lines of a process's output in which its error is looked for."""


def run_cells(
    study: Study,
    out: Path,
    command: Sequence[str],
    *,
    workers: int = 1,
    max_minutes: float | None = None,
    on_begin: Callable[[Cell], None] = lambda cell: None,
    on_end: Callable[[Cell, CellFolder], None] = lambda cell, folder: None,
) -> signal.Signals | None:
    """Run the cells that are not finished, in order; return the signal that stopped it, if any.

    A cell that fails is noted in its folder and stops no other; it is tried again next time.
    SIGINT and SIGTERM reach the cells under way, which keep a checkpoint and go on next time.

    Args:
        study: the cells.
        out: the folder of their folders.
        command: of the process that trains a cell; it gets the folder, and `--max-minutes`.
        workers: cells at a time.
        max_minutes: that a cell may take in all; None: no limit.
        on_begin: told of a cell before it is trained.
        on_end: told of every cell once it is known how far it got.

    Raises:
        ValueError: for workers below 1, or minutes not above 0.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: must be ≥ 1")
    if max_minutes is not None and max_minutes <= 0:
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
            waiting = [pool.submit(work, cell) for cell in study.cells]
            while not all(future.done() for future in waiting) and not interrupted():
                time.sleep(POLL)
        finally:
            # Also on a second signal, which is raised here: no process is left behind.
            stop.set()
        for future in waiting:
            future.result()
        return interrupted()


def is_finished(cell: Cell, folder: CellFolder, max_minutes: float | None) -> bool:
    """Whether there is nothing left to do for a cell."""
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
    """Train a cell in a process of its own, and note how that went."""
    began = time.monotonic()
    try:
        folder.claim(cell)
        arguments = [*command, str(folder.path)]
        if max_minutes is not None:
            # A cell out of minutes still has to be evaluated: some time is left for a step.
            left = max(1e-3, max_minutes - folder.read_minutes())
            arguments += ["--max-minutes", str(left)]
        error = _call(arguments, folder.log, stop)
    except (RunError, OSError) as failure:
        error = str(failure)
    with contextlib.suppress(RunError):
        folder.note((time.monotonic() - began) / 60, error)


def _call(arguments: list[str], log: Path, stop: threading.Event) -> str | None:
    """Run a process to its end; return its error, None if it has none or was stopped from here."""
    with open(log, "a") as output:
        # In a session of its own: Ctrl-C in a terminal would else reach it twice, and kill it.
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
