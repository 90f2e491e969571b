"""The `lab` command. Heavy imports live inside commands, so `lab --help` is quick."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line; Ctrl-C ends it in one line while it is being loaded, too."""
    usual = signal.getsignal(signal.SIGINT)
    if usual == signal.default_int_handler:  # what runs in the background may have to ignore it
        signal.signal(signal.SIGINT, _end)
    from lab.cli.app import app
    from lab.cli.edge import run

    signal.signal(signal.SIGINT, usual)
    sys.exit(run(app))


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"Error: interrupted\n")
    os._exit(128 + number)
