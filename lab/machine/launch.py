"""What torchrun tells each of the processes that it starts, read without importing torch."""

import os
from dataclasses import dataclass

from lab.files import RunError

NAME = "TORCHELASTIC_RUN_ID"
"""The environment variable that only torchrun sets."""


class LostProcessError(RunError):
    """Another process that trains the same run has ended."""


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that train one run.

    Attributes:
        rank: its number among all, from 0; process 0 leads.
        count: how many there are.
        local_rank: its number among those of this machine.
        local_count: how many of them are on this machine.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int


def read_launch() -> Launch | None:
    """Return the place of this process; None where torchrun has started no other."""
    if NAME not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Launch(*(int(os.environ[name]) for name in names))


def forget_launch() -> None:
    """Make this process, and those that it starts, train alone: torchrun's variable is removed."""
    os.environ.pop(NAME, None)
