"""What a state keeps, and for how long."""

from analysis.state_space.words import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
