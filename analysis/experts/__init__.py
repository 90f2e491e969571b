"""Which experts are chosen, what they hold, and what is lost without them."""

from analysis.experts.load import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
