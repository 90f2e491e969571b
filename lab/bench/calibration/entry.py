"""What an instrument is calibrated on: a module with one fault, or with none."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Fault:
    """A module right but for one thing.

    Args:
        name: what is wrong, in a few words.
        law: the law of `lab.laws.LAWS` that must fail.
        build: gives the module, its weights drawn from torch's global generator.
        also: further laws that may rightly fail with it.
        notes: what shows it, where an ordinary probe does not.
    """

    name: str
    law: str
    build: Callable[[], nn.Module]
    also: tuple[str, ...] = ()
    notes: str = ""


@dataclass(frozen=True)
class Right:
    """A module that no law may call failing.

    Args:
        name: what it is, in a few words.
        build: gives the module, its weights drawn from torch's global generator.
        notes: what might mislead a law, or what the module asks of its input.
    """

    name: str
    build: Callable[[], nn.Module]
    notes: str = ""
