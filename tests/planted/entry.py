"""The entries of the calibration: a module with one planted fault, or a right module."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Fault:
    """A module with a single fault.

    Attributes:
        name: what is wrong, in a few words.
        law: the law of `lab.laws.LAWS` that must fail.
        build: makes the module; draws its weights from torch's global generator.
        also: other laws that may fail as a consequence.
        notes: the condition under which the fault shows, if an ordinary probe does not show it.
    """

    name: str
    law: str
    build: Callable[[], nn.Module]
    also: tuple[str, ...] = ()
    notes: str = ""


@dataclass(frozen=True)
class Right:
    """A module on which no law may fail.

    Attributes:
        name: what it is, in a few words.
        build: makes the module; draws its weights from torch's global generator.
        notes: what might mislead a law, or what the module requires of its input.
    """

    name: str
    build: Callable[[], nn.Module]
    notes: str = ""
