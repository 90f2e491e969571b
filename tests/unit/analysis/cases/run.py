"""Findings of a run: how good it is, how it got there, how far it reaches, what changed when."""

from dataclasses import replace
from typing import Any

import numpy as np

from analysis.run.anatomy import StackAnatomy
from analysis.run.baselines import Standing
from analysis.run.curves import Curve
from analysis.run.dynamics import Onset, Onsets, Paths, date_changes
from analysis.run.generalisation import AccuracyByOption
from analysis.run.leaks import LeakCheck
from analysis.run.trajectories import Series
from analysis.statistics.change_points import Change
from lab.models import build
from lab.models.anatomy import dissect
from tests.planted_runs import STEPS, bound
from tests.unit.analysis.case import Case

EXPLAINED = "explained variance"


def take_apart(stack: str) -> StackAnatomy:
    return StackAnatomy.of(dissect(build(stack, vocab_size=50, d_model=16)))


def standing(accuracy: float | None, *ends: float) -> Standing:
    """Return a run that took all its steps, where chance has 10 %."""
    rules = ("chance", "oracle"), (0.1, 1.0)
    interval: Any = ends or None
    return Standing("budget", 30, 0.99, accuracy, interval, 1024, 256, *rules)


def leak(changed: int, moved: float, replaced: int = 9) -> LeakCheck:
    return LeakCheck(2, replaced, 100, changed, moved, 0.5, 8, 100, 0)


def curve(*values: float, quantity: Any = "accuracy", **changed: Any) -> Curve:
    """Return a quantity that is evaluated after steps 1, 2, …"""
    steps, found = np.arange(1, 10), np.array(values)
    at, rows = np.arange(1, len(values) + 1), np.full(len(values), 64)
    references = {"chance": 0.1, "oracle": 1.0}
    made = Curve(quantity, steps, np.full(9, 0.1), 1, at, found, rows, references, title="A curve")
    return replace(made, **changed)


def reach(accuracy: float, half: float, **changed: Any) -> AccuracyByOption:
    """Return the accuracy at twice the length; training's is 90 %, chance 10 %."""
    ends, trained = np.array([[accuracy - half, accuracy + half]]), (16.0, 16.0)
    measured: Any = (np.array([accuracy]), ends, np.array([0.1]))
    rest: Any = (0.9, (0.85, 0.95), ("a guess", 0.1), 9, ())
    made = AccuracyByOption("seq_len", ("32",), (32.0,), trained, "16", *measured, *rest)
    return replace(made, title="Reach", **changed)


def follow(levels: np.ndarray) -> Paths:
    """Return an accuracy that goes through these levels."""
    rest: Any = (None, None, levels, 0.1, "chance", levels, levels[None])
    return date_changes([Series("accuracy", "", "share", *rest)], STEPS, 1, bound())


def at(name: str, low: int, high: int) -> Onset:
    return Onset(name, None, Change(low + 1.0, low, high, low, high, 0.0, 1.0))


def orders(*firsts: str) -> Onsets:
    """Return runs in each of which this one of a and b is first, or neither for "?"."""
    runs = []
    for first in firsts:
        late = (8, 16) if first == "?" else (32, 64)
        a, b = ((8, 16), late) if first != "b" else (late, (8, 16))
        runs.append((at("a", *a), at("b", *b)))
    return Onsets(tuple(f"run {i}" for i in range(len(runs))), tuple(runs), 100)


def guess(low: float) -> AccuracyByOption:
    """Return what falls at 32 to an interval that begins here; a guess has 10 %."""
    return reach(0.2, 0.05, interval=np.array([[low, 0.3]]))


STILL = Onset("a", None, None)
EARLY, LATE = at("a", 8, 16), at("b", 32, 64)
RIVAL = ("a guess", 0.85)
CASES = [
    Case("planted", take_apart("AE*3"), "Blocks: 3;"),
    Case("boundary", take_apart("AN"), "Blocks: 1;"),
    Case("planted", standing(0.5, 0.4, 0.6), "accuracy is above chance."),
    Case("planted", replace(standing(0.5, 0.4, 0.6), measure=EXPLAINED), "explained variance is"),
    Case("null", standing(None), "There is no accuracy to compare", "above"),
    Case("boundary", standing(0.5, 0.1, 0.6), "accuracy is level with chance."),
    Case("boundary", standing(0.05, 0.0, 0.09), "accuracy is below chance."),
    Case("planted", leak(7, 0.5), "The model sees later tokens: replacing them changes 7 of 100"),
    Case(
        "null",
        leak(0, 1e-6),
        "The model does not see later tokens: replacing them changes 0 of 100",
    ),
    # Hidden states move, though no answer changes.
    Case("boundary", leak(0, 0.5), "The model sees later tokens: replacing them changes 0 of 100"),
    Case("boundary", leak(0, 0.0, replaced=0), "so a leak could not show", "does not see"),
    Case("planted", curve(0.1, 0.1, 0.9, 0.9, 0.9), "between steps 2 and 3", "no one place"),
    Case("planted", curve(0.5, measure=EXPLAINED), "the explained variance is 50.0 %", "accuracy"),
    Case("planted", curve(0.5, measure=EXPLAINED, quantity="loss"), "error is 0.500 after", "nats"),
    Case("null", curve(0.1, 0.3, 0.5, 0.7, 0.9), "at no one place", "between"),
    Case("null", curve(), "No evaluation yet"),
    Case("boundary", curve(0.5), "is 50.0 % after step 1.", "and"),
    Case("boundary", curve(1.0, 2.0, quantity="loss", stages=((1, 8), (5, 16))), "16 from step 5"),
    Case("planted", curve(0.5, final=(9, 0.7), test_rows=99), "70.0 % after step 9"),
    Case("planted", reach(0.2, 0.05), "of 1 tried: none.", "holds "),
    Case("null", reach(0.9, 0.05), "of 1 tried: 32.", "falls"),
    Case("boundary", reach(0.5, 0.45), "too wide to say", "falls"),
    # The interval that only reaches that of training is no certain fall.
    Case("boundary", reach(0.8, 0.05, interval=np.array([[0.7, 0.85]])), "of 1 tried: 32."),
    Case("boundary", reach(0.8, 0.05, interval=np.array([[0.7, 0.84]])), "of 1 tried: none."),
    Case("boundary", reach(0.9, 0.05, rival=RIVAL), "not surely better than a guess (85.0 %)"),
    Case("boundary", reach(0.9, 0.05, reference_interval=None), "not surely better than", "holds"),
    Case("boundary", guess(0.1), "not surely above a guess"),
    Case("boundary", guess(0.11), "falls", "not surely"),
    Case("planted", follow(1.0 * (STEPS > 63)), "rows: 1 of 1 (accuracy)."),
    Case("null", follow(np.zeros(len(STEPS))), "none of 1.", "no definite time"),
    Case("boundary", follow(np.linspace(0, 1, len(STEPS))), "moves, at no definite time", "steps"),
    Case("planted", orders("a", "a"), "in the same order in all 2 runs: 1 of 1."),
    Case("planted", orders("a", "a"), "b in 2 of 2"),
    Case("null", orders("?", "?"), "in all 2 runs: 0 of 1.", "b in"),
    Case("boundary", orders("a", "b"), "in all 2 runs: 0 of 1.", "2 of 2"),
    # Only one run has both changes.
    Case("boundary", Onsets(("0", "1"), ((EARLY, LATE), (EARLY,)), 99), "all 2 runs: 0 of 1."),
    Case("planted", Onsets(("",), ((EARLY, LATE),), 99), "a (steps 8 to 16), then b (steps 32"),
    Case("null", Onsets(("",), ((STILL,),), 99), "in order: none at a definite time."),
    Case("boundary", orders("?"), "in order: a and b (steps 8 to 16).", "then"),
]
