"""The processes that train cells on this machine: where a cell becomes a process.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.sweeps.folder import CellFolder

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
POLL = 0.2
"""Seconds between two looks whether the sweep is to stop."""
TAIL = 20
"""Last lines of a process's output that are searched for its error."""
MOST_DEATHS = 6
"""Kills of a process without a new checkpoint after which its cells are taken to be the cause.

Kills from outside should not reach this number, as cells that go on alone end with other bits.
"""


@dataclass(frozen=True)
class Death:
    """How a process ended before its cells did.

    Attributes:
        how: in words.
        again: whether it was none of its own doing, so that another may go on.
    """

    how: str
    again: bool


class Trainer(ABC):
    """Trains cells, one group after another, wherever its process is.

    Args:
        stop: set when the sweep is to end.
    """

    def __init__(self, stop: threading.Event):
        self.stop = stop

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
            RunError: when a folder cannot be used.
            OSError: when the process cannot be started, or the log cannot be written.
        """
        left, deaths = list(folders), []
        while left:
            began = time.monotonic()
            for ended, error in self._ask(tuple(left), max_minutes):
                left.remove(ended)
                on_end(ended, error)
            if not left:
                return
            death = self._end(left)
            if self.stop.is_set():
                return
            deaths.append(sum(map(_find_newest_step, left)))
            if not death.again or deaths.count(deaths[-1]) >= MOST_DEATHS:
                if len(left) == 1:
                    often = f", {MOST_DEATHS} times without a new checkpoint" * death.again
                    on_end(left[0], death.how + often)
                    return
                for folder in left:  # one of them is to blame
                    self.train([folder], max_minutes, on_end)
                return
            if max_minutes is not None:
                max_minutes = max(1e-3, max_minutes - (time.monotonic() - began) / 60)

    @abstractmethod
    def close(self) -> None:
        """End the process if it waits for cells."""

    @abstractmethod
    def _ask(
        self, folders: Sequence[CellFolder], max_minutes: float | None
    ) -> Iterator[tuple[CellFolder, str | None]]:
        """Have cells trained; yield each that has ended, and its error, until all have or death."""

    @abstractmethod
    def _end(self, left: Sequence[CellFolder]) -> Death:
        """Clear up after a process that has ended although cells are left; return how it did."""


class Worker(Trainer):
    """A process on this machine.

    Args:
        command: starts the process.
        variables: environment variables of its own, such as the GPU that it uses.
        stop: set when the sweep is to end.
    """

    def __init__(self, command: Sequence[str], variables: dict[str, str], stop: threading.Event):
        super().__init__(stop)
        self.command, self.variables = list(command), variables
        self.process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the process, which has no cell to train."""
        self._wait()

    def _ask(
        self, folders: Sequence[CellFolder], max_minutes: float | None
    ) -> Iterator[tuple[CellFolder, str | None]]:
        if self.process is None:
            self.process = self._start(folders[0].log)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        by_path = {str(folder.path.resolve()): folder for folder in folders}
        order = {"folders": list(by_path), "max_minutes": max_minutes}
        with contextlib.suppress(BrokenPipeError):  # its output then ends, which is noticed below
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
        asked, missing = False, len(folders)
        while missing:
            readable, _, _ = select.select([self.process.stdout], [], [], POLL)
            if readable:
                line = self.process.stdout.readline()
                if not line.endswith(b"\n"):
                    return
                missing -= 1
                answer = json.loads(line)
                yield by_path[answer["folder"]], answer["error"]
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

    def _end(self, left: Sequence[CellFolder]) -> Death:
        return _describe_death(self._wait(), left[0].log)

    def _wait(self) -> int:
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


def _describe_death(code: int, log: Path) -> Death:
    if code <= 0:
        how = f"killed by {signal.Signals(-code).name}" if code else "stopped by a signal"
        return Death(f"its process was {how}", again=True)
    lines = [line for line in log.read_text(errors="replace").splitlines()[-TAIL:] if line.strip()]
    said = f": {lines[-1]}" if lines else ""
    return Death(f"exit code {code}{said}", again=False)


def start_processes(
    command: Sequence[str], workers: int, stop: threading.Event
) -> Sequence[Trainer]:
    """Return workers on this machine; each starts its process for its first cells.

    Args:
        command: starts a process that trains cells.
        workers: how many.
        stop: set when the sweep is to end.
    """
    return [Worker(command, variables, stop) for variables in choose_gpus(workers)]


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
