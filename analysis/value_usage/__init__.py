"""Which values inner function attention chooses."""

from analysis.value_usage.words import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
