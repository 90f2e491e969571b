"""Training the runs of cells in several processes, each with one thread on a CPU.

A process is started for its first run and then trains one after another, so that importing torch is
paid for once. It reads a pickled order for each and answers with a line: null, or the run's error.
When its input ends, because the sweep was killed, it writes a checkpoint and ends, too.
"""

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from lab.config import Runtime
from lab.files import RunError, describe_error
from lab.machine import keep_freed_memory
from lab.sweeps.outcome import LOG, evaluate_lengths, note_spent, read_spent
from lab.sweeps.sweep import Cell
from lab.training.experiment import carry_out, catch_interrupts
from lab.training.loop import DivergedError
from lab.training.run import Run
from tasks.bounds import TextChangedError

COMMAND = (sys.executable, "-P", "-m", "lab.sweeps.pool")
"""-P: files in the working directory must not take the place of the lab's packages."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
POLL = 0.2
"""Seconds between two looks whether the sweep is to stop."""
TAIL = 20
"""Last lines of a process's output that are searched for its error."""
MOST_KILLS = 6
"""Kills without a new checkpoint in between after which a run is taken to be their cause."""


@dataclass(frozen=True)
class CellRun:
    """A cell, the run that it describes, and the machine settings of that."""

    cell: Cell
    run: Run
    runtime: Runtime


class KilledError(Exception):
    """A process was killed before the run that it trained had ended; another may go on."""


class LostClusterError(RunError):
    """The cluster that trains the runs of a sweep is gone, so none of them goes on."""


class Worker:
    """A process on this machine that trains runs, started for its first one.

    Args:
        stop: set when the sweep is to end.
        variables: environment variables of its own, such as the GPU that it uses.
    """

    def __init__(self, stop: threading.Event, variables: Mapping[str, str] | None = None):
        self.stop, self.variables = stop, variables or {}
        self.process: subprocess.Popen[bytes] | None = None

    def train(self, each: CellRun, max_minutes: float | None) -> str | None:
        """Train a run to its end, or to a checkpoint if the sweep is to end; return its error.

        Raises:
            KilledError: when what trained it was killed.
            LostClusterError: when no run can be trained any more.
            RunError: when the folder cannot be used.
            OSError: when the process cannot be started.
        """
        log = each.run.path / LOG
        process = self.process = self.process or self._start(log)
        assert process.stdin is not None
        assert process.stdout is not None
        runtime = replace(each.runtime, max_minutes=max_minutes)
        with contextlib.suppress(BrokenPipeError):  # its output then ends, too
            process.stdin.write(pickle.dumps((each.run, runtime, each.cell.lengths)))
            process.stdin.flush()
        asked = False
        while not select.select([process.stdout], [], [], POLL)[0]:
            if self.stop.is_set() and not asked:
                process.send_signal(signal.SIGINT)
                asked = True
        answer = process.stdout.readline()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        code = self._wait()
        if self.stop.is_set():
            return None
        if code <= 0:
            how = f"killed by {signal.Signals(-code).name}" if code else "stopped by a signal"
            raise KilledError(f"its process was {how}")
        lines = log.read_text(errors="replace").splitlines()[-TAIL:]
        said = [line for line in lines if line.strip()][-1:]
        return ": ".join([f"exit code {code}", *said])

    def close(self) -> None:
        """End the process if there is one."""
        self._wait()

    def _wait(self) -> int:
        """Close the pipes of the process, and return its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return process.wait()

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        with open(log, "a") as output:
            # In its own session, or else Ctrl-C in a terminal would reach it twice and kill it.
            return subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **ONE_THREAD, **self.variables},
                start_new_session=True,
            )


def serve() -> None:
    """Train the runs that come on stdin until it ends, or a signal has stopped one."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    keep_freed_memory()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            run, runtime, lengths = pickle.load(orders)
            with open(run.path / LOG, "a") as log:
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)
            error = None
            try:
                if _has_lost_sweep() or _train_here(run, runtime, lengths):
                    return
            except (RunError, DivergedError, TextChangedError, ValueError) as failure:
                error = str(failure)
                print(f"Error: {error}", file=sys.stderr, flush=True)
            except Exception as failure:  # e.g. from a user's mixer
                error = describe_error(failure)
                traceback.print_exc()
                sys.stderr.flush()
            print(json.dumps(error), file=answers, flush=True)


def _train_here(run: Run, runtime: Runtime, lengths: Sequence[int]) -> bool:
    """Train a run to its end and evaluate its lengths; return whether a signal stopped it."""

    def end_with_sweep(row: object) -> None:
        if _has_lost_sweep():
            signal.raise_signal(signal.SIGINT)

    if carry_out(run, runtime, on_row=end_with_sweep)["signal"]:
        return True
    evaluate_lengths(run, lengths)
    return False


def _has_lost_sweep() -> bool:
    """Whether the input has ended: while a run is trained, nothing comes on it."""
    return bool(select.select([0], [], [], 0)[0])


def open_workers(count: int, stop: threading.Event) -> list[Worker]:
    """Return workers on this machine, among which GPUs are dealt out in turns.

    Several workers on one GPU share its memory. Without a GPU there is nothing to deal out.
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = map(str, range(torch.cuda.device_count())) if visible is None else visible.split(",")
    names = [name for name in found if name]
    gpus = [{"CUDA_VISIBLE_DEVICES": name} for name in names] or [{}]
    return [Worker(stop, gpus[i % len(gpus)]) for i in range(count)]


def check_limits(workers: int, max_minutes: float | None) -> None:
    """Check the number of workers and of minutes.

    Raises:
        ValueError: for workers below 1, or minutes not above 0.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: must be ≥ 1")
    if max_minutes is not None and not max_minutes > 0:  # NaN too
        raise ValueError(f"max_minutes={max_minutes}: must be > 0")


def run_cells(
    runs: Sequence[CellRun],
    workers: Sequence[Worker],
    stop: threading.Event,
    *,
    max_minutes: float | None = None,
    on_begin: Callable[[Cell], None] = lambda cell: None,
    on_end: Callable[[Cell, str | None], None] = lambda cell, error: None,
) -> signal.Signals | None:
    """Train the runs of cells in order; return the signal that stopped this, if any.

    The error of a run that fails is kept in its folder. Others go on, and it is tried again next
    time. SIGINT and SIGTERM let the running ones write a checkpoint, from which they go on next
    time. A process that is killed is started again.

    Args:
        runs: of the cells.
        workers: each trains one run at a time.
        stop: theirs; is set when this ends.
        max_minutes: most minutes of a run in total; None: no limit.
        on_begin: called with a cell before it is trained.
        on_end: called after a cell was trained, with its error.
    """
    waiting, telling = deque(runs), threading.Lock()

    def work(worker: Worker) -> None:
        try:
            while not stop.is_set():
                try:
                    each = waiting.popleft()
                except IndexError:
                    return
                with telling:
                    on_begin(each.cell)
                error = _train(worker, each, max_minutes)
                with telling:
                    on_end(each.cell, error)
        finally:
            worker.close()

    with catch_interrupts() as interrupted, ThreadPoolExecutor(len(workers) or 1) as pool:
        busy = [pool.submit(work, worker) for worker in workers]
        try:
            ended, left = set(), busy
            while left and not interrupted() and not any(each.exception() for each in ended):
                ended, left = wait(busy, POLL, FIRST_EXCEPTION)
        finally:
            stop.set()  # also on a second signal, which raises here: no process is left behind
        for each in busy:
            each.result()
        return interrupted()


def _train(worker: Worker, each: CellRun, max_minutes: float | None) -> str | None:
    """Claim and train a run, again where its process is killed; keep its minutes and its error."""
    run, began, newest = each.run, time.monotonic(), []
    try:
        run.claim()
    except RunError as failure:  # the folder is not this run's, or cannot be written
        return str(failure)
    while True:
        try:
            minutes = max_minutes
            if minutes is not None:
                spent = read_spent(run.path)[0] + (time.monotonic() - began) / 60
                minutes = max(1e-3, minutes - spent)  # it must still be evaluated, after a step
            error = worker.train(each, minutes)
            break
        except KilledError as kill:
            newest.append(max(run.list_checkpoints(), default=0))
            if newest.count(newest[-1]) >= MOST_KILLS:
                error = f"{kill}, {MOST_KILLS} times without a new checkpoint"
                break
        except LostClusterError:
            raise
        except (RunError, OSError) as failure:
            error = str(failure)
            break
    with contextlib.suppress(RunError, OSError):
        note_spent(run, (time.monotonic() - began) / 60, error)
        if not (run.path / LOG).stat().st_size:
            (run.path / LOG).unlink()
    return error


if __name__ == "__main__":
    serve()
