"""What running an erratum gives."""

from collections.abc import Callable
from dataclasses import dataclass

MINIATURE = (
    "the printed evidence is a miniature of the fault, written out in this row: only the meant "
    "side can turn with the lab's code"
)
"""Note of the rows whose printed reading raises an error of Python's or torch's own."""


@dataclass(frozen=True, kw_only=True)
class Erratum:
    """One row: what is printed and what is meant, and what happened when both were run.

    Attributes:
        row: its name, a letter and a number.
        where: place in the paper, by its labels.
        printed: what stands there.
        meant: what was meant.
        printed_evidence: what the printed reading did, with its number.
        meant_evidence: what the meant one did.
        printed_option: how to train the printed reading; None where it cannot run.
        meant_option: how the lab offers the meant one.
        fails: whether the printed reading failed as said.
        holds: whether the meant one held.
        note: what else there is to know.
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
        """Whether the row is as the table says: printed fails and meant holds."""
        return self.fails and self.holds


def catch_refusal(error: type[Exception], call: Callable[[], object]) -> str | None:
    """Return the kind and message of the error that a call raises, None where it runs.

    Of a message in several lines, the last that says something, up to a set that it shows: sets
    print in another order each time.
    """
    try:
        call()
    except error as raised:
        lines = [line.strip() for line in str(raised).splitlines() if line.strip()]
        said = lines[-1].partition(": {")[0] if lines else "without words"
        return f"{type(raised).__name__}: {said}"
    return None
