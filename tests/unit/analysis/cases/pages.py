"""Cases of the findings of pages: runs side by side, laws of a certificate."""

from dataclasses import replace
from typing import Any

import numpy as np

from analysis.pages.certificate import Laws
from analysis.pages.comparison import RunAccuracies, RunColumn, RunCurves
from lab.models.anatomy import StateSize
from tests.unit.analysis.case import Case


def run(name: str, accuracy: float | None, half_right: int | None = None) -> RunColumn:
    ends = None if accuracy is None else (accuracy - 0.05, accuracy + 0.05)
    sizes = 99, StateSize(64, 4096)
    blank: Any = ("AM", {}, "budget", accuracy, ends, 1.0, 9, 1.0, 1.0, *sizes, None, 64)
    right = np.full(2, accuracy or 0.0)
    held_out: Any = {"held_out_steps": np.array([1, 2]), "held_out": right}
    return RunColumn(name, *blank, **held_out, half_right=half_right, stages=((8, 5), (16, 4)))


def accuracies(*values: float | None) -> RunAccuracies:
    runs = tuple(run(name, value) for name, value in zip("abc", values, strict=False))
    return RunAccuracies(runs, {"chance": 0.1, "last value": 0.3, "oracle": 1.0})


def laws(verdict: str, measured: float | None, allowed: float | None) -> Laws:
    law = {"law": "causal", "verdict": verdict, "measured": measured, "allowed": allowed}
    law |= {"evidence": "length 7", "counterexample": "moves output 0" * (verdict == "fails")}
    return Laws("Laws of a:B", {"laws": [law]})


CLOSE = replace(run("a", 0.33), interval=(0.3, 0.36))
CASES = [
    Case("planted", accuracies(0.9, 0.1), "above “last value” (30.0 %): 1 of 2"),
    Case("null", accuracies(0.3, None), "above “last value” (30.0 %): 0 of 1"),
    Case("null", accuracies(None), "0 of 0 that have a result"),
    # An interval that only reaches what a shortcut has does not lie above it.
    Case("boundary", RunAccuracies((CLOSE,), {"last value": 0.3}), "0 of 1"),
    Case("planted", RunCurves((run("a", 0.6, 1),), {}), "full row length: 1 of 1."),
    Case("null", RunCurves((run("a", 0.1),), {}), "full row length: 0 of 1."),
    Case("boundary", RunCurves((run("a", 0.5, 2),), {"chance": 0.1}), "a 2 8 for 5, 16 for 4"),
    Case("planted", laws("fails", 1e-3, 1e-9), "1 fails.", "holds"),
    Case("null", laws("not decided", None, None), "1 not decided.", "fails"),
    Case("boundary", laws("holds", 1.0, 1.0), "1 holds.", "fails"),
]
