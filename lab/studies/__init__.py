"""Studies: many runs that answer one question, resumable, and one tidy table of them."""

from lab.studies.study import Cell, Study

__all__ = ["Cell", "Study"]
