"""Modules that try to outlive their tester, to decide for it, or to take what they may not."""

import ctypes
import json
import mmap
import os
import signal
import time
from pathlib import Path

import torch
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


class Flooding(Honest):
    """Writes without end, and without a line's end, into every file that is open for writing."""

    def __init__(self):
        super().__init__()
        for number in range(3, 64):
            try:
                while True:
                    os.write(number, b"x" * 2**20)
            except OSError:
                continue


class Orphaning(Honest):
    """Kills the process above it, in a process of its own that no parent's end reaches."""

    def __init__(self):
        super().__init__()
        guard = os.getppid()
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            _note("orphaning")
            time.sleep(600)
        time.sleep(0.5)
        os.kill(guard, signal.SIGKILL)
        time.sleep(600)


class Stopping(Honest):
    """Stops the process above it, and never ends."""

    def __init__(self):
        super().__init__()
        _note("stopping")
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(600)


class UnspeakableError(Exception):
    """An error that cannot be put in words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Raising(Honest):
    """Raises what cannot be printed."""

    def forward(self, x):
        raise UnspeakableError


class Colourful(Honest):
    """Has names that would control a terminal, and raises text that would."""

    def __init__(self):
        super().__init__()
        self.register_parameter("\x1b[2J\x07", nn.Parameter(torch.zeros(3)))

    def forward(self, x):
        raise ValueError("\x1b]0;owned\x07\n\x1b[31mError: all laws hold" + "y" * 10**6)


class Leaving(Honest):
    """Ends its process without a word once it has been probed."""

    calls = 0

    def forward(self, x):
        Leaving.calls += 1
        if Leaving.calls > 40:
            os._exit(0)
        return self.map(x)


class Deep(Honest):
    """Calls itself without end."""

    def forward(self, x):
        return self.forward(x)


class Crashing(Honest):
    """Reads where there is nothing."""

    def forward(self, x):
        ctypes.string_at(0)
        return x


class Closing(Honest):
    """Closes every file that is open."""

    def __init__(self):
        super().__init__()
        os.closerange(0, 256)


class Replacing(Honest):
    """Replaces functions that its tester uses."""

    def __init__(self):
        super().__init__()
        torch.equal = torch.allclose = lambda *given, **more: True
        json.dumps = lambda *given, **more: "{}"
        os.getpid = lambda: 1
