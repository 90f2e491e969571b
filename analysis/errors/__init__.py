"""Which answers are wrong, and why."""

from analysis.errors.words import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
