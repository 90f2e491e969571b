"""Which mistakes does it make? Every wrong answer, with its cause."""

from analysis.base import Subject, describe, draw
from analysis.errors.attribution import attribute_errors
from analysis.errors.examples import Examples
from analysis.errors.ledger import Ledger

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "Errors"


def measure(subject: Subject) -> list[Ledger | Examples]:
    """Return the causes of a subject's errors, and examples if there are any errors.

    Raises:
        NotApplicableError: when no position is scored.
    """
    ledger, examples = attribute_errors(subject)
    return [ledger, examples] if ledger.wrong else [ledger]
