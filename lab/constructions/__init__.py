"""Weights set by hand that solve a task, and for mixers that cannot, the reason.

A construction shows what a mixer can represent: a trained model that reaches less did not learn it.
It is a ceiling, a unit test and a warm start. `construct` sets the weights; `ladder` tries every
mixer and mask.
"""

from lab.constructions.cannot import CannotError
from lab.constructions.ladder import Rung, ladder, rung
from lab.constructions.solve import BUILT, construct

__all__ = ["BUILT", "CannotError", "Rung", "construct", "ladder", "rung"]
