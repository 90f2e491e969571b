"""Where recall looks."""

from analysis.recall.results import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
