"""The rows of the task, as the model sees and answers them."""

from analysis.rows.layout import TITLE, describe, draw, measure

__all__ = ["TITLE", "describe", "draw", "measure"]
