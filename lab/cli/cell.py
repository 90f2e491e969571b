"""The process that trains cells of a sweep: `python -P -m lab.cli.cell`.

Each line of its input is an order to train one cell, or several together, and each line of its
output the answer for one cell (`lab.sweeps.workers`). What cells print goes to the first one's log.
"""

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lab.machine.spinning import wait_briefly

if TYPE_CHECKING:
    from lab.sweeps.folder import CellFolder
    from lab.sweeps.sweep import Cell
    from lab.training.runs import Run

OnEnd = Callable[["CellFolder", str | None], None]
COMMAND = (sys.executable, "-P", "-m", "lab.cli.cell")
"""-P: files in the working directory must not take the place of the lab's packages."""
CHUNK = 65_536


def serve() -> None:
    """Train the cells that stdin orders until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
    training, over = threading.Event(), threading.Event()
    threading.Thread(target=_read_orders, args=(orders, training, over), daemon=True).start()
    from lab.machine.memory import keep_freed_memory
    from lab.sweeps.folder import CellFolder

    keep_freed_memory()
    while (order := orders.get()) is not None:
        folders = [CellFolder(Path(path)) for path in order["folders"]]
        with open(folders[0].log, "a") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        training.set()
        if over.is_set():  # set before read, as the thread does in the other order
            return
        stopped = _train_in_turn(folders, order["max_minutes"], partial(_answer, answers))
        training.clear()
        if stopped:
            return


def _answer(answers: TextIO, folder: "CellFolder", error: str | None) -> None:
    print(json.dumps({"folder": str(folder.path), "error": error}), file=answers)


def _read_orders(
    orders: "queue.Queue[dict[str, Any] | None]", training: threading.Event, over: threading.Event
) -> None:
    """Put each order into a queue; at the end of the input, let the cell write a checkpoint.

    Args:
        orders: the queue.
        training: set while a cell is trained.
        over: is set at the end of the input, when no order is to be begun any more.
    """
    text = b""
    # Not sys.stdin: its lock would be held when the process ends.
    while chunk := os.read(0, CHUNK):
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            orders.put(json.loads(line))
    over.set()
    orders.put(None)
    if training.is_set():
        os.kill(os.getpid(), signal.SIGINT)


def _train_in_turn(
    folders: "Sequence[CellFolder]", max_minutes: float | None, on_end: OnEnd
) -> bool:
    """Train cells together, and one after another those that could not be, when one has failed.

    Returns:
        whether a signal stopped them.
    """
    left = list(folders)

    def end(folder: "CellFolder", error: str | None) -> None:
        left.remove(folder)
        on_end(folder, error)

    if len(left) > 1:
        _, stopped = _try(partial(train_together, folders, end))
        if stopped:
            return True
    for folder in list(left):
        error, stopped = _try(partial(train_cell, folder, max_minutes))
        if stopped:
            return True
        end(folder, error)
    return False


def _try(train: Callable[[], bool]) -> tuple[str | None, bool]:
    """Call what trains cells; return its error, if it has one, and whether a signal stopped it."""
    from lab.files import RunError, describe_error
    from lab.training.divergence import DivergedError
    from tasks.corpus import TextChangedError

    try:
        return None, train()
    except (RunError, DivergedError, TextChangedError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        return str(error), False
    except Exception as error:  # e.g. from a user's mixer; the traceback goes into the log
        traceback.print_exc()
        sys.stderr.flush()
        return describe_error(error), False


def train_together(folders: "Sequence[CellFolder]", on_end: OnEnd) -> bool:
    """Train cells of one shape as lanes, from their checkpoints, and evaluate their lengths.

    Args:
        folders: of the cells.
        on_end: called with the folder of each that has ended, and its error.

    Returns:
        whether a signal stopped them.

    Raises:
        ValueError: for options that make no run, or runs of different shapes.
        RunError: when a folder cannot be read or written.
    """
    from lab.cli.run_settings import describe_run
    from lab.training.lanes import train_lanes

    cells = [folder.read_cell() for folder in folders]
    described = [
        describe_run(cell.task, dict(cell.options), folder.run_path)
        for cell, folder in zip(cells, folders, strict=True)
    ]
    runs = [run for run, _ in described]
    of_run = {
        run.path: (folder, cell) for run, folder, cell in zip(runs, folders, cells, strict=True)
    }

    def end(run: "Run", result: dict[str, Any], error: Exception | None) -> None:
        folder, cell = of_run[run.path]
        if not result["signal"]:
            if error is None:
                _evaluate(run, folder, cell)
            on_end(folder, None if error is None else str(error))

    results = train_lanes(runs, described[0][1], shared=True, on_end=end)
    return any(result["signal"] for result in results)


def train_cell(folder: "CellFolder", max_minutes: float | None = None) -> bool:
    """Train a cell to its end, from its checkpoint if there is one, and evaluate its lengths.

    Returns:
        whether a signal stopped it.

    Raises:
        ValueError: for options that make no run.
        RunError: when a folder cannot be read or written.
        DivergedError: when training diverges.
    """
    from dataclasses import replace

    from lab.cli.run_settings import describe_run
    from lab.training.experiment import carry_out

    cell = folder.read_cell()
    run, runtime = describe_run(cell.task, dict(cell.options), folder.run_path)
    result = carry_out(run, replace(runtime, max_minutes=max_minutes))
    if result["signal"]:
        return True
    _evaluate(run, folder, cell)
    return False


@contextmanager
def claim_run(folder: "CellFolder") -> Iterator[None]:
    """Claim and lock the run of a cell that is trained elsewhere, for a `with` block.

    Raises:
        ValueError: for options that make no run.
        RunError: when the folder cannot be used or written.
    """
    from lab.cli.run_settings import read_settings
    from lab.training.session import claim_folder

    cell = folder.read_cell()
    run, _ = read_settings(cell.task, dict(cell.options), folder.run_path)
    with claim_folder(run):
        yield


def _evaluate(run: "Run", folder: "CellFolder", cell: "Cell") -> None:
    """Evaluate a run that has ended at the row lengths of its cell."""
    from lab.sweeps.lengths import evaluate_lengths

    folder.write_lengths(evaluate_lengths(run, cell.lengths))


if __name__ == "__main__":
    wait_briefly()
    serve()
