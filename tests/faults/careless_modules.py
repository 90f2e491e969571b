"""Modules that crash, hang, take too much memory, or start processes and leave them."""

import ctypes
import os
from pathlib import Path

import torch
from torch import nn

NOTES = "CARELESS_NOTES"
"""Environment variable: the folder where processes of these modules leave their numbers."""


class Honest(nn.Module):
    """A layer that does as it is told."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x):
        return self.map(x)


def _note() -> None:
    Path(os.environ[NOTES], str(os.getpid())).touch()


class Spinning(Honest):
    """Starts a process, and spins without end in both."""

    def __init__(self):
        super().__init__()
        os.fork()
        _note()
        while True:
            pass


class Hoarding(Honest):
    """Keeps more in each call than in the one before."""

    def __init__(self):
        super().__init__()
        self.kept = [torch.ones(2**26)]

    def forward(self, x):
        self.kept.append(torch.cat([*self.kept, self.kept[0]]))
        return self.map(x)


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
        raise ValueError("\x1b]0;title\x07\n\x1b[31mError: all laws hold" + "y" * 10**6)


class Deep(Honest):
    """Calls itself without end."""

    def forward(self, x):
        return self.forward(x)


class Crashing(Honest):
    """Reads where there is nothing."""

    def forward(self, x):
        ctypes.string_at(0)
        return x
