"""The process that trains cells of a sweep: `python -P -m lab.cli.cell`.

Each line of its input is an order, and each line of its output the answer to one
(`lab.sweeps.workers`). What a cell prints goes to the cell's log.
"""

import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.machine.spinning import wait_briefly

if TYPE_CHECKING:
    from lab.sweeps.folder import CellFolder

COMMAND = (sys.executable, "-P", "-m", "lab.cli.cell")
"""-P: files in the working directory must not take the place of the lab's packages."""
CHUNK = 65_536


def serve() -> None:
    """Train the cells that stdin orders until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
    training = threading.Event()
    threading.Thread(target=_read_orders, args=(orders, training), daemon=True).start()
    from lab.machine.memory import keep_freed_memory
    from lab.sweeps.folder import CellFolder

    keep_freed_memory()
    while (order := orders.get()) is not None:
        folder = CellFolder(Path(order["folder"]))
        with open(folder.log, "a") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        training.set()
        error, stopped = _try_cell(folder, order["max_minutes"])
        training.clear()
        if stopped:
            return
        print(json.dumps({"error": error}), file=answers)


def _read_orders(orders: "queue.Queue[dict[str, Any] | None]", training: threading.Event) -> None:
    """Put each order into a queue; at the end of the input, let the cell write a checkpoint."""
    text = b""
    # Not sys.stdin: its lock would be held when the process ends.
    while chunk := os.read(0, CHUNK):
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            orders.put(json.loads(line))
    orders.put(None)
    if training.is_set():
        os.kill(os.getpid(), signal.SIGINT)


def _try_cell(folder: "CellFolder", max_minutes: float | None) -> tuple[str | None, bool]:
    """Train a cell; return its error, if it has one, and whether a signal stopped it."""
    from lab.files import RunError, shorten_message
    from lab.training.fit import DivergedError
    from tasks.corpus import TextChangedError

    try:
        return None, train_cell(folder, max_minutes)
    except (RunError, DivergedError, TextChangedError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        return str(error), False
    except Exception as error:  # of a mixer of the user's, say; the log has where
        traceback.print_exc()
        sys.stderr.flush()
        return f"{type(error).__name__}: {shorten_message(error)}", False


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
    from lab.sweeps.lengths import evaluate_last, evaluate_lengths
    from lab.training.experiment import carry_out

    cell = folder.read_cell()
    run, runtime = describe_run(cell.task, dict(cell.options), folder.run_path)
    result = carry_out(run, replace(runtime, max_minutes=max_minutes))
    if result["signal"]:
        return True
    alone = list(cell.lengths) == [run.task.seq_len]
    folder.write_lengths([evaluate_last(run)] if alone else evaluate_lengths(run, cell.lengths))
    return False


if __name__ == "__main__":
    wait_briefly()
    serve()
