"""Work that another process does if this one is killed, or ended by a library."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAY = "print(sys.argv[1], file=sys.stderr)"
# A process that the killed one had started may write there a little longer, so it is tried again.
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
    """Start a process that runs a program if its input ends without a word.

    It is in its own session, where Ctrl-C in a terminal does not reach it, and no child of this
    process: Ray's workers kill their children when they end.
    """
    waits = "if not os.fork() and not sys.stdin.read():"
    waiting = f"import os, shutil, sys, time\n{waits}\n    exec({program!r})"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", waiting, word],
        stdin=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    ) as watcher:
        watcher.wait()  # it has forked the process that waits, and ends at once
        assert watcher.stdin is not None
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):  # it was killed itself
                watcher.stdin.write(b"ended")
