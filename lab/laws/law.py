"""What a law is, what it asks of a module, what it tries and what it concludes."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lab.certify_settings import Condition
from lab.files import describe_error

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


@dataclass(frozen=True)
class Law:
    """A property that every causal model must have.

    Attributes:
        name: stands in its verdicts.
        judge: tries a module from [b t d] to [b t …] on `Probes` and returns a verdict.
        conditions: "first", the first condition only, for laws that measure numbers or vary the
            weights themselves; "evaluating", all conditions in evaluation mode; "all", for laws
            that hold in training as well.
        seeded: whether random numbers that the module draws are fixed by a seed during the trial.
    """

    name: str
    judge: Callable[[nn.Module, Any], Verdict]
    conditions: Literal["first", "evaluating", "all"] = "first"
    seeded: bool = True

    def select(self, conditions: Sequence[Condition]) -> list[Condition]:
        """Return those of a module's conditions that this law is tried under."""
        if self.conditions == "first":
            return [conditions[0]]
        return [c for c in conditions if self.conditions == "all" or not c.training]


class RefusalError(ValueError):
    """A module takes no sequence, or returns none; the message says what was tried."""


class IncomparableError(RefusalError):
    """An adapter cannot give a module what a law compares, whatever the input."""


def describe_refusal(error: BaseException) -> str:
    """Describe in one line why a module was refused, or what it raised."""
    return str(error) if isinstance(error, RefusalError) else f"raised {describe_error(error)}"


Check = Callable[..., tuple[Tensor, Tensor]]
"""check(module, x, **given) → a difference [b t …] that a law says is zero, and its reference."""


@dataclass(frozen=True)
class Trial:
    """One comparison whose difference a law says is zero.

    Attributes:
        check: computes the difference; reproductions print its source.
        given: the check's further arguments, literals.
        words: describes a failure; {row} and {position} name where the difference is largest.
        refusable: whether a module may refuse the check's input, by its length or its rows.
    """

    check: Check
    given: Mapping[str, Any]
    words: str
    refusable: bool = False


Trials = Callable[[nn.Module, Tensor], Iterable[Trial]]
"""The trials of a law on one input of a module."""


LEAST = 4
"""Lengths that a law tries however long it takes: the first, of one token, can show no leak."""
LONGER_SHARE = 0.15
"""Share of a law's time that longer lengths may take beside it."""
COMMON, AMPLE = 513, 4
"""Up to this length, which exceeds usual chunks and windows, they may take four times as much."""


def read_clock() -> float:
    """Return the seconds that this process has computed, per thread.

    On a machine that other programs use, waiting would cut a law off before it has tried what it
    is made to try, and a fault would pass for none.
    """
    return time.process_time() / torch.get_num_threads()


class Timer:
    """Decides whether there is time for a further, longer input.

    The processor's time for the same work varies with what else runs on the machine, twofold and
    more. What is found should not vary with it, so the time for common lengths is ample.

    Args:
        seconds: time that the law may take.
    """

    def __init__(self, seconds: float):
        self._seconds, self._length = seconds * LONGER_SHARE, 0
        self._began = self._last = 0.0

    def allows(self, length: int) -> bool:
        """Whether an input of a length should end in time, from what the one before took."""
        now = read_clock()
        if not self._length:
            self._began = self._last = now
        expected = (now - self._last) * (length / max(self._length, 1)) ** 2
        self._last, self._length = now, length
        seconds = self._seconds * (AMPLE if length <= COMMON else 1)
        return now + expected - self._began <= seconds
