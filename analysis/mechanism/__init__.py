"""How the answer comes about: the attention edges that carry it."""

from analysis.mechanism.results import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
