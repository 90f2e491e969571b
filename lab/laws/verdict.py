"""What a law concludes about a module."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["holds", "fails", "not applicable", "not decided"]


@dataclass(frozen=True)
class Verdict:
    """A law's outcome on a module, with the numbers behind it.

    Attributes:
        law: its name.
        verdict: the outcome.
        evidence: the numbers, in words.
        counterexample: the smallest one found, in words; None unless the law fails.
        measured: the number that decides the law: an error, a growth, a count of rows.
        allowed: the bound on that number.
        snippet: a program that shows the failure without this project, and exits with code 1.
        where: the counter-example's numbers by name: length, rows, row, position, the check's own.
        left: what was not decided although the law holds, in words.
        tokens: length of the longest input that was compared; 0 where none was.
        note: what the law does not judge, but a reader should know, in words: a failure in fp64
            alone, and not in the module's own precision; a submodule that is never called.
    """

    law: str
    verdict: Outcome
    evidence: str
    counterexample: str | None = None
    measured: int | float | None = None
    allowed: int | float | None = None
    snippet: str | None = None
    where: Mapping[str, Any] | None = None
    left: str = ""
    note: str = ""
    tokens: int = 0
