"""The processes that train cells: the only place where a cell becomes a process.

A worker is started for its first cells and then trains one group after another, so that importing
torch is paid for once. It reads a JSON line for each group of cells that are computed together, and
answers with one for each cell. When its input ends, because the sweep was killed, it writes
checkpoints and ends, too.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.sweeps.folder import CellFolder

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
POLL = 0.2
"""Seconds between two looks whether the sweep is to stop."""
TAIL = 20
"""Last lines of a process's output that are searched for its error."""
MOST_DEATHS = 3
"""A cell whose process is killed is tried again, unless this often since its newest checkpoint."""


class Worker:
    """A process that trains cells, one after another.

    Args:
        command: starts the process.
        variables: environment variables of its own, such as the GPU that it uses.
        stop: set when the sweep is to end.
    """

    def __init__(self, command: Sequence[str], variables: dict[str, str], stop: threading.Event):
        self.command, self.variables, self.stop = list(command), variables, stop
        self.process: subprocess.Popen[bytes] | None = None

    def train(
        self,
        folders: Sequence[CellFolder],
        max_minutes: float | None,
        on_end: Callable[[CellFolder, str | None], None],
    ) -> None:
        """Train cells to their ends, several of them together.

        Args:
            folders: of the cells.
            max_minutes: most minutes; None: no limit.
            on_end: called when a cell has ended, with its error; not where it was stopped.

        Raises:
            OSError: when the process cannot be started, or the log cannot be written.
        """
        left, deaths = list(folders), []
        while left:
            order = {"folders": [str(f.path.resolve()) for f in left], "max_minutes": max_minutes}
            began, log = time.monotonic(), left[0].log
            for answer in self._ask(order, log):
                ended = next(f for f in left if str(f.path.resolve()) == answer["folder"])
                left.remove(ended)
                on_end(ended, answer["error"])
            if not left:
                return
            code = self._end()
            if self.stop.is_set():
                return
            deaths.append(sum(map(_find_newest_step, left)))
            if code > 0 or deaths.count(deaths[-1]) >= MOST_DEATHS:
                if len(left) == 1:
                    on_end(left[0], _describe_death(code, log))
                    return
                for folder in left:  # one of them is to blame
                    self.train([folder], max_minutes, on_end)
                return
            if max_minutes is not None:
                max_minutes = max(1e-3, max_minutes - (time.monotonic() - began) / 60)

    def close(self) -> None:
        """End the process, which has no cell to train."""
        self._end()

    def _ask(self, order: dict[str, Any], log: Path) -> Iterator[dict[str, Any]]:
        """Send an order and yield the answer for each cell, until the process ends or all came."""
        if self.process is None:
            self.process = self._start(log)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # an answer that ends tells that it is dead
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
        asked, missing = False, len(order["folders"])
        while missing:
            readable, _, _ = select.select([self.process.stdout], [], [], POLL)
            if readable:
                line = self.process.stdout.readline()
                if not line.endswith(b"\n"):
                    return
                missing -= 1
                yield json.loads(line)
            if self.stop.is_set() and not asked:
                self.process.send_signal(signal.SIGINT)
                asked = True

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        with open(log, "a") as output:
            # In its own session, or else Ctrl-C in a terminal would reach it twice and kill it.
            return subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                env={**os.environ, **ONE_THREAD, **self.variables},
                start_new_session=True,
            )

    def _end(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return process.wait()


def _find_newest_step(folder: CellFolder) -> int:
    run = folder.open_run()
    return 0 if run is None else max(run.list_checkpoints(), default=0)


def _describe_death(code: int, log: Path) -> str:
    if code <= 0:
        how = f"killed by {signal.Signals(-code).name}" if code else "stopped by a signal"
        return f"its process was {how}, {MOST_DEATHS} times without a new checkpoint"
    lines = [line for line in log.read_text(errors="replace").splitlines()[-TAIL:] if line.strip()]
    return f"exit code {code}: {lines[-1] if lines else ''}"


def choose_gpus(workers: int) -> list[dict[str, str]]:
    """Return the environment variables of each worker: GPUs are dealt out in turns.

    Several workers on one GPU share its memory. Without a GPU there is nothing to choose.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list_gpus() if visible is None else [name for name in visible.split(",") if name]
    if not names:
        return [{} for _ in range(workers)]
    return [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} for i in range(workers)]


def list_gpus() -> list[str]:
    """Return the numbers of the GPUs that torch sees."""
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]
