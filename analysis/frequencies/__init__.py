"""Which rotary frequencies a head uses."""

from analysis.frequencies.words import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
