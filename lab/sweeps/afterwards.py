"""What is still done when this process is killed, or ended by a library: another waits for that."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAY = "print(sys.argv[1], file=sys.stderr)"
# A process that still writes there, which this one had started, makes it fail, and then ends.
REMOVE = """
for _ in range(60):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(1)
"""


@contextmanager
def say_if_killed(line: str) -> Iterator[None]:
    """Have a line printed on stderr if this process ends inside a `with` block."""
    with _run_if_killed(SAY, line):
        yield


@contextmanager
def remove_if_killed(folder: Path) -> Iterator[None]:
    """Have a folder removed if this process ends inside a `with` block."""
    with _run_if_killed(REMOVE, str(folder)):
        yield


@contextmanager
def _run_if_killed(program: str, word: str) -> Iterator[None]:
    """Start a process that runs a program if its input ends without a word."""
    waiting = f"import os, shutil, sys, time\nif not sys.stdin.read():\n    exec({program!r})"
    # In its own session: Ctrl-C in a terminal must not reach it.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", waiting, word],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as watcher:
        assert watcher.stdin is not None
        try:
            yield
        finally:
            watcher.stdin.write(b"ended")
