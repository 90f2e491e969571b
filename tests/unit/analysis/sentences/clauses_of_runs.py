"""Clauses of words about runs, rows, sweeps and rankings, each with and without."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from analysis.rows.layout import RowLayout
from analysis.run.paths import Paths, QuantityPath
from analysis.sweeps.widths import WidthCurves

from analysis.pages.ranking import Contender, Measure, Ranking
from analysis.pages.run_accuracy import RunAccuracies, RunCurves
from analysis.rows.samples import Continuations
from analysis.rows.tokens import Looks, TokenRow
from analysis.run.baselines import Standing
from analysis.run.curves import Curve
from analysis.run.trajectories import Series
from analysis.sweeps.capacity import CapacityCurves
from tests.unit.analysis.sentences.clauses import Clause
from tests.unit.analysis.sentences.of_models import estimate
from tests.unit.analysis.sentences.of_runs import (
    halves,
    leak,
    order_in_one,
    orders,
    reach,
    row,
    run,
    setting,
)

LEAK = replace(leak(0, 0.0), behind=math.nan)


def touch(end: float, **changed: Any):
    """Return what holds at 32 up to this end of the interval; training's begins at 85 %."""
    return replace(reach(0.8, 0.05), interval=np.array([[0.7, end]]), **changed)


def guessed(low: float):
    """Return what falls at 32 to an interval that begins here; a guess has 10 %."""
    return replace(reach(0.2, 0.05), interval=np.array([[low, 0.3]]))


def wide(low: float):
    """Return what does not surely fall, with an interval that begins here."""
    return replace(reach(0.5, 0.4), interval=np.array([[low, 0.9]]))


def further(last: float):
    """Return what falls at 32 and at 64, to this; half of the lead over a guess is 50 %."""
    found = np.array([0.6, last])
    ends, places = np.stack([found - 0.05, found + 0.05], 1), (32.0, 64.0)
    rest: Any = {"accuracy": found, "interval": ends, "chance": np.full(2, 0.1), "rows": (64, 64)}
    return replace(reach(0.5, 0.05), values=("32", "64"), places=places, **rest)


def curve(
    window: int = 1, stages: tuple[tuple[int, int], ...] = (), second: int = 9, **changed: Any
) -> Curve:
    """Return a loss that is evaluated at step 3 and at this one."""
    steps, at = np.arange(1, 10), np.array([3, second])
    held_out = at, np.ones(2), np.full(2, 8)
    found = Curve("loss", steps, np.ones(9), window, *held_out, references={}, stages=stages)
    return replace(found, **changed)


def standing(accuracy: float, ends: tuple[float, float]) -> Standing:
    """Return a run that took all its steps, where chance has 10 %."""
    rules = ("chance", "oracle"), (0.1, 1.0)
    return Standing("budget", 30, 0.99, accuracy, ends, 1024, 256, *rules)


def looks(shown: int, kept: int) -> TokenRow:
    """Return a row of which this many tokens are shown, and of each so many entries."""
    part = np.zeros((shown, kept))
    head = Looks(0, 0, "Attention", part.astype(int), part, np.zeros(shown))
    blank: Any = {"roles": (0,) * shown, "answers": ("",) * shown, "targets": ("",) * shown}
    text = ("a",) * shown
    return replace(
        row(3, 2), seq_len=4, heads=(head,), tokens=text, positions=(0,) * shown, **blank
    )


def layout(cells: int) -> RowLayout:
    one, text = np.ones(1), (("a",) * cells,)
    shown: Any = (np.zeros((1, cells), int), text, text)
    return RowLayout("mqar", 8, 1, ("key",), one, 1.0, one, 0, 8, *shown)


def texts(unit: str) -> Continuations:
    return Continuations(unit, 8, 99, estimate(2.0), estimate(4.0), (), 5, None)


def ranking(measure: Measure, *better: tuple[str, str], **changed: Any) -> Ranking:
    """Return settings a and b, of which half of a's runs and fewer of b's are solved."""
    values = (0.9, 0.5) if measure == "accuracy" else (30.0, math.inf)
    contenders = tuple(
        Contender(name, (value, value), (True, True), value)
        for name, value in zip("ab", values, strict=True)
    )
    return replace(Ranking(measure, contenders, better, (), False, ""), **changed)


def paths(rows: int) -> Paths:
    """Return an accuracy that stays, on this many rows."""
    levels = np.full(2, 0.1)
    still = Series(
        "accuracy", "", "share", None, None, levels, None, "chance", levels, levels[None]
    )
    return Paths(np.array([0, 9]), rows, (QuantityPath((still,), (None,), 0),))


ROW = row(3, 2)
STAGES = (0, 8), (5, 16)
TWO = halves((4, 3, 5), (16, 12, 20))
SIZELESS = CapacityCurves(tuple(replace(each, size=None) for each in TWO.curves), "")
RUNS = (run("a", 0.6),)
GREW = replace(run("a", 0.6), stages=((8, 5), (16, 4)))
CLAUSES = [
    Clause(replace(LEAK, cuts=1), LEAK, "Rows were cut at 1 place, and"),
    Clause(LEAK, replace(LEAK, cuts=1), "Rows were cut at 2 places, and"),
    Clause(leak(7, 0.5), leak(0, 0.0), "largest one. None of 8 test rows is among the first 100"),
    Clause(leak(0, 0.0), LEAK, "Of the answers after the cut 50.0 % change."),
    Clause(replace(LEAK, repeated=1), LEAK, "The task has few different rows, so that"),
    Clause(replace(LEAK, repeated=1), replace(LEAK, repeated=2), "1 of 8 test rows is among"),
    Clause(replace(LEAK, repeated=2), replace(LEAK, repeated=1), "2 of 8 test rows are among"),
    Clause(orders("a", "a"), orders("a"), "things change, 2 runs"),
    Clause(orders("a", "a"), orders("a"), "in the same order in both runs once in 2 times."),
    Clause(orders("a"), orders("a", "a"), "In which order things change  First a"),
    Clause(orders("a"), orders("a", "a"), "white noise. Dots on an axis of steps"),
    Clause(orders("a", "a", "a"), order_in_one(), "in all 3 runs once in 4 times."),
    Clause(touch(0.85), touch(0.84), "above that it holds as far as was tried, 80.0 % at 32."),
    Clause(
        touch(0.9, reference_interval=(0.8, 1.0), rival=("a guess", 0.8)),
        touch(0.9, reference_interval=(0.8, 1.0), rival=("a guess", 0.7)),
        "That is not certainly more than a guess (80.0 %)",
    ),
    Clause(touch(0.85, trained=None), touch(0.84, trained=None), "32, no certain difference"),
    Clause(
        touch(0.9, trained=None, reference_interval=(0.5, 0.7)),
        touch(0.9, trained=None, reference_interval=(0.5, 0.69)),
        "32, no certain difference",
    ),
    Clause(touch(0.9), touch(0.9, trained=(8.0, 16.0)), "The grey line is what was trained on."),
    Clause(guessed(0.1), guessed(0.11), "20.0 % at 32, not certainly more than a guess"),
    Clause(wide(0.1), wide(0.11), "no fall is certain as far as was tried"),
    Clause(further(0.5), further(0.49), "keeps half of its lead over a guess up to 64"),
    Clause(curve(window=2), curve(), "training batches, means of 2 steps"),
    Clause(curve(window=2), curve(), ", means of"),
    Clause(curve(stages=STAGES), curve(stages=STAGES[1:]), "A dotted line marks where rows of"),
    Clause(
        curve(stages=STAGES, second=5),
        curve(stages=STAGES, second=4),
        "those of 16 begin at step 5, and end at a held-out loss",
    ),
    Clause(standing(0.5, (0.1, 0.6)), standing(0.5, (0.11, 0.6)), "accuracy is level with chance."),
    Clause(
        standing(0.1, (0.0, 0.1)), standing(0.05, (0.0, 0.09)), "accuracy is level with chance."
    ),
    Clause(paths(1), paths(2), "all on the same 1 test row."),
    Clause(ROW, replace(ROW, seq_len=1), " of them is shown"),
    Clause(ROW, replace(ROW, seq_len=1), " tokens are shown."),
    Clause(looks(3, 2), looks(2, 2), "Only the 2 largest entries of each row are shown."),
    Clause(layout(4), layout(8), "Only positions 0 … 3 are shown."),
    Clause(layout(4), layout(8), "Only positions"),
    Clause(texts("byte"), texts("token"), "Control characters appear as pictures"),
    Clause(TWO, halves((4, 3, 5)), "From d=8 to"),
    Clause(TWO, SIZELESS, "From d=8 to"),
    Clause(halves((4, 0.0, math.inf)), TWO, "half of 4.0 pairs (95 %: below 2 … above 64)."),
    Clause(halves((64, 60, 64)), halves((65, 60, 70)), "recalls half of 64.0 pairs"),
    Clause(halves((2, 2, 3)), halves((1, 0, 3)), "recalls half of 2.0 pairs"),
    Clause(
        WidthCurves((setting(8, 0.5), setting(16, 0.9))),
        WidthCurves((setting(8, 0.5, 0.6), setting(16, 0.9, 0.9))),
        ", 1 seed)",
    ),
    Clause(ranking("steps", ("a", "b")), ranking("steps"), "a (median 30 steps) is solved sooner"),
    Clause(ranking("steps", ("a", "b")), ranking("rows"), "than b (fewer than half of its runs"),
    Clause(
        ranking("accuracy", ("a", "b")),
        ranking("steps", ("a", "b")),
        "a (90.0 %) is more often right than b (50.0 %).",
    ),
    Clause(ranking("steps"), ranking("steps", ("a", "b")), "No difference between settings is"),
    Clause(ranking("steps", blind=True), ranking("steps"), "no difference could be: train more"),
    Clause(ranking("steps", alone=("c",)), ranking("steps"), "One seed, so no rank: c."),
    Clause(ranking("steps"), ranking("accuracy"), "A ring is a run, one for each seed; a triangle"),
    Clause(ranking("accuracy"), ranking("steps"), "the diamond is their mean. Two settings"),
    Clause(RunCurves(RUNS, {"chance": 0.1}), RunCurves(RUNS, {}), "otted"),
    Clause(RunCurves((GREW,), {}), RunCurves(RUNS, {}), "Steps at each row length: a 5 at 8"),
    Clause(
        RunCurves((GREW,), {}),
        RunCurves((replace(GREW, stages=GREW.stages[:1]),), {}),
        "Steps at each row length:",
    ),
    Clause(
        RunCurves((replace(RUNS[0], full_from=1),), {}),
        RunCurves((replace(RUNS[0], full_from=2),), {}),
        "Half of the answers are right at full row length: a by step 2.",
    ),
    Clause(
        RunAccuracies((run("a", 0.9996),), {}),
        RunAccuracies((run("a", 0.3),), {}),
        "Test accuracy: a 99.960 %.",
    ),
    # An interval that only reaches what chance has does not lie above it.
    Clause(
        RunAccuracies((replace(run("a", 0.3), interval=(0.11, 0.4)),), {"chance": 0.1}),
        RunAccuracies((replace(run("a", 0.3), interval=(0.1, 0.4)),), {"chance": 0.1}),
        "The intervals of all runs lie above chance",
    ),
]
