"""What the dynamic masks do: whom they keep, what they take, whether they learn."""

from analysis.dynamic_mask.words import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
