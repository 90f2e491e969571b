"""Weights set by hand that solve a task, and for mixers that cannot, the reason.

A ceiling, a unit test and a warm start: what they reach the mixer can represent, so a model that
falls short of it did not learn. `construct` sets them; `ladder` tries every mixer and mask.
"""

from lab.constructions.cannot import CannotError
from lab.constructions.ladder import Rung, ladder, rung
from lab.constructions.solve import BUILT, construct

__all__ = ["BUILT", "CannotError", "Rung", "construct", "ladder", "rung"]
