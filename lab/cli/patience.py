"""Say that a command is still preparing, where that takes more than a moment."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 1.5
"""After which the user is told."""


@contextmanager
def say_if_slow(what: str) -> Iterator[None]:
    """Print what is being done to standard error if a `with` block takes long; empty: never."""
    timer = threading.Timer(SECONDS, _say, [what])
    timer.daemon = True
    if what:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    from lab.cli.console import open_console

    open_console(stderr=True).print(f"{what}; Ctrl-C stops")
