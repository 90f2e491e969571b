"""What each mixer does, as one matrix."""

from analysis.matrices.pictures import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
