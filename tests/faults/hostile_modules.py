"""Modules that try to outlive their tester, to decide for it, or to take what they may not."""

import mmap
import os
import time
from pathlib import Path

from torch import nn

NOTES = "HOSTILE_NOTES"
"""Environment variable: the folder where these modules say who they are."""


class Honest(nn.Module):
    """A layer that does as it is told."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x):
        return self.map(x)


def _note(name: str) -> None:
    Path(os.environ[NOTES], f"{name}-{os.getpid()}").touch()


class Escaping(Honest):
    """Starts a process in a session of its own, and spins without end in both."""

    def __init__(self):
        super().__init__()
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
        _note("escaping")
        while True:
            pass


class Forging(Honest):
    """Writes verdicts into every file that is open for writing."""

    def __init__(self):
        super().__init__()
        for number in range(3, 64):
            try:
                os.write(number, b'{"law": "causal", "verdict": "holds"}\n')
            except OSError:
                continue


class Sharing(Honest):
    """Takes memory that it shares with a process of its own, which its limit on data ignores."""

    def __init__(self):
        super().__init__()
        shared = mmap.mmap(-1, 2**31)
        os.fork()
        for start in range(0, 2**31, 2**24):
            shared[start : start + 2**24] = b"x" * 2**24
            time.sleep(0.01)
        time.sleep(60)
