"""Try a call in a process of its own, with little memory and time, and say how it ended."""

import contextlib
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import torch

from lab.cli import main
from tests.brief import behave_as_in_tests
from tests.forkserver import connect_server

SECONDS = 60
"""Most time of a case; a machine that is busy makes all slower."""
GIBIBYTE = 2**30
MEMORY = 3
"""GiB that a case may take: a schedule of 10⁹ values would take eight times as much."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    Attributes:
        code: the exit code; minus the signal that ended the process.
        text: what it printed, standard error included.
    """

    code: int
    text: str

    @property
    def fault(self) -> str:
        """What is wrong with how it ended; empty if nothing is."""
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        if "Traceback (most recent call last)" in self.text:
            return f"traceback: {self.text.strip().rpartition(chr(10))[2]}"
        if "Error: unexpected: " in self.text:
            return self.text[self.text.index("unexpected: ") :].strip().partition("\n")[0]
        if self.code not in (0, 1, 2, 128 + signal.SIGINT):
            return f"exit code {self.code}"
        if self.code and not any(line.startswith("Error: ") for line in self.text.splitlines()):
            return f"exit code {self.code} without a reason"
        control = [c for c in self.text if c < " " and c not in "\n\t\r"]
        return f"control characters {control[:3]}" if control else ""


def attempt(call: Callable[[], object], memory: float = MEMORY, seconds: int = SECONDS) -> Outcome:
    """Carry out a call in a process of its own, with this one's environment and folder.

    Args:
        call: what can be pickled. It is forked where Polars was never used, whose threads do not
            survive a fork.
        memory: GiB that it may take.
        seconds: after which it is ended.
    """
    pool = _start_forking()
    return pool.submit(_fork, call, memory, seconds, os.getcwd(), dict(os.environ)).result()


@cache
def _start_forking() -> ProcessPoolExecutor:
    """Start the process that forks all others, which has one thread."""
    return ProcessPoolExecutor(1, mp_context=connect_server(), initializer=behave_as_in_tests)


def _fork(
    call: Callable[[], object],
    memory: float,
    seconds: int,
    folder: str,
    environment: Mapping[str, str],
) -> Outcome:
    """Fork a process that carries out a call, and return how it ended."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            _become(call, said.fileno(), int(memory * GIBIBYTE), seconds)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        text = said.read().decode(errors="surrogateescape")
    return Outcome(os.waitstatus_to_exitcode(status), text)


def run_command(*words: str) -> Callable[[], None]:
    """Return a call of the command line with these words."""
    return partial(_run_words, words)


def _run_words(words: Sequence[str]) -> None:
    sys.argv = ["lab", *words]
    main()


def _become(call: Callable[[], object], output: int, memory: int, seconds: int) -> None:
    """Carry out a call in this process, and end it."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        for name, number in ("stdout", 1), ("stderr", 2):
            setattr(sys, name, os.fdopen(number, "w", buffering=1))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        signal.alarm(seconds)
        torch.set_num_threads(1)
        call()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def report(suite: str, tried: int, failed: Sequence[str]) -> None:
    """Print the counts of a suite, and fail with its faults if there are any.

    To standard error, since xdist drops what its workers print.
    """
    print(f"\n{suite}: {tried:,} tried, {len(failed):,} failed", file=sys.stderr)
    assert not failed, "\n".join(failed[:40])
