"""The result of running an erratum."""

from collections.abc import Callable
from dataclasses import dataclass

MINIATURE = (
    "The listing does not run, so the printed evidence is from a small copy of its faulty lines; "
    "only the intended reading runs the lab's code."
)
"""Note of the rows whose printed reading raises an error of Python or torch itself."""


@dataclass(frozen=True, kw_only=True)
class Erratum:
    """One row: what is printed, what is meant, and what happened when both were run.

    Attributes:
        row: its name, a letter and a number.
        where: place in the paper, by its labels.
        printed: what the paper says there.
        meant: what was meant.
        printed_evidence: what the printed reading did, with numbers.
        meant_evidence: what the meant one did.
        printed_option: how to train the printed reading; None if it cannot run.
        meant_option: how to train the meant one.
        fails: whether the printed reading failed as described.
        holds: whether the meant one held.
        note: further remarks.
    """

    row: str
    where: str
    printed: str
    meant: str
    printed_evidence: str
    meant_evidence: str
    printed_option: str | None
    meant_option: str
    fails: bool
    holds: bool
    note: str = ""

    @property
    def confirmed(self) -> bool:
        """Whether the printed reading fails and the meant one holds."""
        return self.fails and self.holds


def catch_refusal(error: type[Exception], call: Callable[[], object]) -> str | None:
    """Return the type and message of the error that a call raises, or None if it runs.

    Of a message in several lines, this is the last line that is not empty, without any set that it
    shows, because the order of a printed set varies.
    """
    try:
        call()
    except error as raised:
        lines = [line.strip() for line in str(raised).splitlines() if line.strip()]
        said = lines[-1].partition(": {")[0] if lines else "without words"
        return f"{type(raised).__name__}: {said}"
    return None
