"""What is asked? The first rows of the task, position by position, with the right answers."""

from analysis.base import Subject, describe, draw
from analysis.rows.layout import RowLayout, lay_out

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "What is asked?"


def measure(subject: Subject) -> list[RowLayout]:
    """Lay out the subject's first rows."""
    return [lay_out(subject.task, subject.batch)]
