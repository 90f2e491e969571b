"""The entries of the calibration: a module with one planted fault, or a right module."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


class Row:
    """A fault of a table: its name, and what is patched in a right module.

    Args:
        name: of the `Fault`, and so are `also` and `notes`.
        base: the right module, or a module with a fault of its own.
        adds: attributes that are made after the module's own, each by a function.
        patches: attributes of the class that replace its own.
    """

    def __init__(
        self,
        name: str,
        base: type[nn.Module],
        also: tuple[str, ...] = (),
        notes: str = "",
        adds: Mapping[str, Callable[[], Any]] | None = None,
        **patches: Any,
    ):
        self.name, self.base, self.also, self.notes = name, base, also, notes
        self.adds, self.patches = adds or {}, patches


def plant(law: str, *rows: Row) -> tuple[Fault, ...]:
    """Return the faults of a law that rows plant in right modules.

    Each is a class of this module, named after the fault, so that a program can import it.
    """
    return tuple(Fault(row.name, law, patch(row), row.also, row.notes) for row in rows)


def patch(row: Row) -> type[nn.Module]:
    """Return the base with what the row adds and patches; itself if that is nothing."""
    if not row.patches and not row.adds:
        return row.base

    def build(self: nn.Module) -> None:
        row.base.__init__(self)
        for name, make in row.adds.items():
            setattr(self, name, make())

    name = re.sub(r"\W+", "_", row.name)
    made = type(name, (row.base,), {"__init__": build, "__module__": __name__, **row.patches})
    setattr(sys.modules[__name__], name, made)
    return made
