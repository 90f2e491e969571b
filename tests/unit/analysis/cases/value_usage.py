"""Findings about the values of inner function attention."""

import math
from typing import Any

import numpy as np

from analysis.value_usage import Swap, Swaps
from analysis.value_usage.choices import Dependence, LayerUsage, ValueHistory, ValueUses
from lab.intervals import Estimate
from tests.unit.analysis.case import Case


def uses(used: int, information: float, null: float, margin: float = 0.1) -> ValueUses:
    depends, shares = Dependence(information, null, 0.6), np.full(4, 0.5)
    rest: Any = (used, 2.0, 0.1, 0.1, depends, depends, margin, 0.0)
    return ValueUses((LayerUsage(0, shares, shares[None], *rest),), ("key",))


def history(used: list[int], ties: float, churn: float = 0.1) -> ValueHistory:
    n = len(used)
    line, dealt = np.full(n, 0.1), np.full(n, 0.5)
    return ValueHistory(
        layer=0,
        steps=np.arange(n),
        shares=np.full((n, 4), 0.5),
        used=np.array(used),
        effective=np.array(used, float),
        ties=np.full(n, ties),
        churn=line,
        churn_interval=np.full((n, 2), churn),
        churn_dealt=dealt,
        title="Layer 0 · use of values over training",
    )


def swaps(change: float, p: float, right: Estimate | None = None) -> Swaps:
    """Return a layer whose shuffle changes nothing, and in which forcing value 2 changes this."""
    found = (0.0, 1.0, None), (change, p, 2)
    made = tuple(
        Swap(0, value, None, Estimate(by, by - 0.1, by + 0.1, 0.0), q) for by, q, value in found
    )
    return Swaps(right or Estimate(0.9, 0.8, 1.0, 0.5), made, 0.0, ("key",))


GUESSES, ONE_ROW = Estimate(0.5, 0.4, 0.6, 0.5), Estimate(0.9, math.nan, math.nan, 0.5)
CASES = [
    Case(
        "planted",
        uses(3, 0.5, 0.1),
        "3 of 4 in layer 0; layers whose choice depends on the role: 1",
    ),
    Case("null", uses(3, 0.1, 0.1), "layers whose choice depends on the role: 0 of 1"),
    # Every token chooses the same two: what is left of I is rounding.
    Case("boundary", uses(2, 2e-16, 0.0), "layers whose choice depends on the role: 0 of 1"),
    Case("boundary", uses(2, 0.5, 0.1, margin=math.nan), "2 of 4 in layer 0", "(0.0 %)"),
    Case(
        "planted", history([1, 3], 1.0), "tie for 100.0 % of the tokens) and 3 at step 1; between"
    ),
    Case("null", history([4, 4], 0.0), "4 of 4 values at step 0 (scores tie for 0.0 % of the"),
    Case("boundary", history([1, 3], 1.0, math.nan), "[one row: no interval] of the tokens change"),
    Case("planted", swaps(-0.4, 0.01), "shown to cost accuracy: 1 of 2; the most costly, forcing"),
    Case("null", swaps(-0.1, 0.4), "shown to cost accuracy: 0 of 2; the most costly, forcing"),
    Case("boundary", swaps(-0.4, 0.01, GUESSES), "cannot tell which values matter", "costly"),
    Case("boundary", swaps(-0.4, 0.01, ONE_ROW), "cannot tell which values matter", "costly"),
    # More answers are right than before: surely different, but no cost.
    Case("boundary", swaps(0.4, 0.01), "shown to cost accuracy: 0 of 2"),
]
