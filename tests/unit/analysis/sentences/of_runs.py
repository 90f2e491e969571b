"""Findings of experts, values, runs and sweeps, planted by hand, with their words."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from analysis.claims.costs import SettingCosts
from analysis.errors.examples import Example, Examples
from analysis.errors.ledger import Ledger
from analysis.experts.co_activation import CoActivation
from analysis.experts.effects import AnswerChange
from analysis.experts.held_answers import HeldAnswers, Holder
from analysis.experts.layer_knockout import Deletion, LayerKnockout, RoleDeletion
from analysis.experts.layer_pairs import LayerPairs
from analysis.experts.role_effects import RoleEffects
from analysis.run.onsets import Onset, Onsets
from analysis.statistics.binned import Bins
from analysis.sweeps.costs import AccuracyCosts
from analysis.sweeps.rates import RateCurve, RateCurves
from analysis.sweeps.survival import SolvingCurve, SolvingCurves
from analysis.sweeps.widths import WidthCurves
from analysis.value_usage.history import ValueHistory
from analysis.value_usage.uses import Dependence, LayerUsage, ValueUses

from analysis.capacity import Capacity
from analysis.pages.run_accuracy import RunAccuracies, RunCurves
from analysis.pages.run_columns import RunColumn
from analysis.rows.tokens import TokenRow
from analysis.run.generalisation import AccuracyByOption
from analysis.run.leaks import LeakCheck
from analysis.statistics.change_points import Change
from analysis.sweeps.capacity import CapacityCurve, CapacityCurves
from analysis.sweeps.settings import SettingResult
from tests.unit.analysis.sentences.of_models import Case


def change(loss: float, half: float = 0.05) -> AnswerChange:
    return AnswerChange(loss, (loss - half, loss + half), 0.0, (-half, half))


def knockout(
    loaded: float,
    twin: float,
    twins: int = 2,
    half: float = 0.05,
    by_role: Mapping[str, AnswerChange] | None = None,
) -> LayerKnockout:
    found = [Deletion((0, 0), False, 0.1, 0.1, change(loaded, half))]
    found += [Deletion((0, 1), True, 0.1, 0.1, change(twin, half))] * twins
    at = tuple(RoleDeletion(role, 9, found, found) for role, found in (by_role or {}).items())
    ends: Any = (tuple(found), change(loaded, half), {}, at, 0, 0.0)
    return LayerKnockout(0, "CDMoE", 16, 20, 40, 1.0, 0.5, *ends)


def roles(**changes: AnswerChange) -> RoleEffects:
    return RoleEffects((knockout(0.0, 0.0, by_role=changes),))


def together(excess: float) -> CoActivation:
    """Return a layer whose mean PMI exceeds that of the shuffles by this much."""
    bars = np.zeros(140)
    found: Any = (None, np.zeros(19), 0.2, 0.2, np.zeros(0, int), (), bars, bars)
    return CoActivation((LayerPairs(0, 99, 9, 9, excess, *found),))


def held(count: int, holders: int, asked: int = 96, halved: int | None = None) -> HeldAnswers:
    top = tuple(Holder((0, i), count // holders, 1.0, ()) for i in range(holders))
    blank = np.zeros(1), np.zeros(1), np.zeros(1, bool)
    ends: Any = (holders, "token", math.nan, math.nan, 0, top, *blank)
    halved = count if halved is None else halved
    return HeldAnswers(0, "CDMoE", 6, asked, count, halved, 0, asked, (0.99, 2.0), *ends)


def history(used: list[int], n_values: int, *, zero_keys: bool) -> ValueHistory:
    n = len(used)
    shares, line, ends = np.full((n, n_values), 0.5), np.full(n, 0.1), np.full((n, 2), 0.1)
    return ValueHistory(
        0, np.arange(n), shares, np.array(used), line * 10, line, line, ends, line, zero_keys
    )


def usage(used: int, information: float, null: float, bound: float = 0.6) -> ValueUses:
    depends = Dependence(information, information, null, null, bound)
    shares, margins = np.full(4, 0.5), np.full(5, 0.1)
    rest: Any = (used, 2.0, 0.1, 0.1, depends, depends, margins, 0.0)
    return ValueUses((LayerUsage(0, "hard", 2, shares, shares[None], *rest),), ("key",))


def capacity(*accuracy: float, first: int = 1) -> Capacity:
    n = len(accuracy)
    pairs, shares = first * 2 ** np.arange(n), np.array(accuracy)
    ends = np.stack([shares, shares], 1)
    return Capacity(pairs, shares, ends, np.full(n, 0.1), np.ones(n, int), 0.99)


def ledger(rows: int) -> Ledger:
    return Ledger(rows, 9, 0, (0.0, 0.3), (), False, math.nan, (0, 0), 0, 0, None, 1)


def leak(changed: int, moved: float, replaced: int = 9) -> LeakCheck:
    return LeakCheck(2, replaced, 100, changed, moved, 0.5, 8, 100, 0)


def at(name: str, low: int, high: int) -> Onset:
    return Onset(name, None, Change(low + 1.0, low, high, low, high, 0.0, 1.0), moved=True)


def orders(*firsts: str) -> Onsets:
    """Return runs in each of which this one of a and b is first, or neither for "?"."""
    runs = []
    for first in firsts:
        late = (8, 16) if first == "?" else (32, 64)
        a, b = ((8, 16), late) if first != "b" else (late, (8, 16))
        runs.append((at("a", *a), at("b", *b)))
    return Onsets(tuple(map(str, range(len(runs)))), tuple(runs), 100)


def order_in_one() -> Onsets:
    """Return two runs; b changes in the first alone."""
    a, b = at("a", 8, 16), at("b", 32, 64)
    return Onsets(("0", "1"), ((a, b), (a,)), 100)


def reach(accuracy: float, half: float) -> AccuracyByOption:
    """Return the accuracy at twice the length; training's is 90 %, chance 10 %."""
    ends, trained = np.array([[accuracy - half, accuracy + half]]), (16.0, 16.0)
    measured: Any = (np.array([accuracy]), ends, np.array([0.1]), (64,))
    rest: Any = (0.9, (0.85, 0.95), ("a guess", 0.1), 9, ())
    return AccuracyByOption("seq_len", ("32",), (32.0,), trained, "16", *measured, *rest)


def run(name: str, accuracy: float | None, steps: tuple[int, ...] = (1, 2)) -> RunColumn:
    ends = None if accuracy is None else (accuracy - 0.05, accuracy + 0.05)
    blank: Any = ("AM", {}, "budget", accuracy, ends, 1.0, 9, 1.0, 1.0, 99, None, 64)
    right, rows = np.full(len(steps), accuracy or 0.0), np.full(len(steps), 8)
    held_out: Any = {"held_out_steps": np.array(steps, int), "held_out": right}
    return RunColumn(name, *blank, **held_out, held_out_rows=rows)


def accuracies(*values: float | None) -> RunAccuracies:
    runs = tuple(run(name, value) for name, value in zip("abc", values, strict=False))
    return RunAccuracies(runs, {"chance": 0.1, "oracle": 1.0})


def setting(width: int, *shares: float, seconds: float = 5.0) -> SettingResult:
    n = len(shares)
    rest: Any = ((9,) * n, (False,) * n, (seconds,) * n, 99)
    return SettingResult({"d_model": width}, tuple(range(n)), shares, (), *rest)


def halves(*found: tuple[float, float, float]) -> CapacityCurves:
    """Return curves of sizes 8, 16, … by half point and interval."""
    pairs, shares = np.array([2, 64]), np.array([1.0, 0.0])
    curves = [
        CapacityCurve(f"d={8 * 2**i}", 8.0 * 2**i, pairs, shares, half, 2.0, (low, high))
        for i, (half, low, high) in enumerate(found)
    ]
    return CapacityCurves(tuple(curves), "d")


def rates(*validation: float) -> RateCurves:
    tried = tuple(0.001 * 3**i for i in range(len(validation)))
    best = tried[int(np.argmax(validation))]
    return RateCurves((RateCurve("AM", tried, validation, ((0.5,),) * len(tried), best),))


def solving(solved: int, median: float) -> SolvingCurves:
    line = np.zeros(1)
    return SolvingCurves((SolvingCurve("AM", line, line, 3, solved, median, (1.0, 9.0)),))


def row(scored: int, right: int) -> TokenRow:
    token: Any = ((0,), ("a",), (0,), ("b",), ("b",), ())
    return TokenRow(0, "the first", 200, scored, right, ("key",), (), *token)


def bins(*accuracy: float, half: float) -> Bins:
    shares, first = np.array(accuracy), np.arange(len(accuracy))
    return Bins(first, first, shares, np.stack([shares - half, shares + half], 1), first + 99)


ONE = "One expert of the 1 most loaded stands out"
NO = "No single expert of the 1 most loaded stands out"
CASES = [
    Case("planted", knockout(0.5, 0.1), f"{ONE}: deleting expert (0, 0) alone"),
    Case("null", knockout(0.0, 0.0), NO),
    # Its interval holds the twins' effect, so that one of them could be as harmful.
    Case("boundary", knockout(0.12, 0.1), NO, "One expert"),
    Case("boundary", knockout(0.5, 0.1, twins=1), "deleting its twin by +0.10", "1 twins"),
    Case("boundary", knockout(0.5, 0.1, half=math.nan), "[one row: no interval]"),
    Case("planted", roles(key=change(0.5), value=change(0.1)), "needed most at key tokens"),
    Case("null", roles(key=change(0.0), value=change(0.0)), "No role is seen to need", "most"),
    Case("null", roles(key=change(0, 0.001)), "matter at the tokens of no role.", "most"),
    Case(
        "boundary",
        roles(key=change(0.5), value=change(0.45)),
        "needed at key tokens in layer 0, not surely more than at value tokens in layer 0",
        "most",
    ),
    Case("boundary", roles(key=change(0.5, math.nan)), "[one row: no interval]", "needed"),
    Case("planted", together(1.5), "Experts are chosen together in layer 0"),
    Case("null", together(0.0), "No pair of experts is seen to act together in layer 0"),
    # Beyond all shuffles, and yet 1.00 times independence.
    Case("boundary", together(0.002), "No pair of experts is seen to act together", "times"),
    Case("planted", held(96, 16), "96 of 96 answers (100.0 %) in layer 0 are each held by"),
    Case("null", held(0, 1), "Hardly any answer is held by one expert alone: 0 of 96", "more"),
    # Experts that answers need two by two: each halves them, and none holds them alone.
    Case(
        "boundary",
        held(0, 1, halved=90),
        "by 0.99 nats in the median and 2.00 at the 90 % quantile; without it 90 more are half as "
        "likely or less, but wrong anyway or in need of other experts as well",
    ),
    Case("boundary", held(96, 1), "Expert (0, 0) alone holds any", "1 experts"),
    Case("planted", history([1, 3, 2], 4, zero_keys=True), "because all keys are zero"),
    Case("null", history([2, 2, 2], 4, zero_keys=False), "as at every step between", "because"),
    Case("boundary", history([4, 4], 4, zero_keys=True), "use 4 of 4 values", "because"),
    Case("boundary", history([2, 2], 4, zero_keys=False), "they use 2 (e^H", "between;"),
    Case("planted", usage(3, 0.5, 0.1), "and the choice depends on the role"),
    Case("null", usage(3, 0.1, 0.1), "shows no dependence on the role"),
    # Every token chooses the same two: what is left of I is rounding.
    Case("boundary", usage(2, 2e-16, 0.0), "shows no dependence on the role"),
    Case("boundary", usage(3, 0.0, 0.0, bound=0.0), "all tokens have the same role", "depend"),
    Case("planted", capacity(1, 1, 0.5), "Learned to 99.0 % up to 2 pairs"),
    Case("null", capacity(0.1, 0.1, first=2), "Not learned to 99.0 % even at 2 pairs"),
    Case("boundary", capacity(1, 0.98996), "up to 1 pair: 100.000 % at 1 in 1 step, 98.996 % at"),
    Case("boundary", capacity(0.99, 0.5), "up to 1 pair: 99.0 % at 1 in 1 step,", "1 pairs"),
    Case("boundary", ledger(1), "no error among 9 scored positions of 1 row: the", "1 rows"),
    Case("planted", leak(7, 0.5), "sees later tokens: replacing them changes 7 of 100 answers"),
    Case("null", leak(0, 1e-6), "never changes it, and none of 8 test rows"),
    Case("boundary", leak(0, 0.5), "though none of 100 answers", "means nothing"),
    Case("boundary", leak(0, 0.0, replaced=0), "a leak could not show, and none of", "never"),
    Case("planted", orders("a", "a"), "A before b in 2 of 2 runs.", "All other"),
    Case("boundary", order_in_one(), "A before b in the one run in which both change.", "1 of 1"),
    Case("null", orders("?", "?"), "In no run is the order of two changes decided"),
    Case("boundary", orders("a", "?"), "in 1 of 2 runs. All other orders are not decided."),
    Case("planted", reach(0.2, 0.05), "falls at once, to 20.0 % at 32"),
    Case("null", reach(0.9, 0.05), "above that it holds as far as was tried, 90.0 % at 32."),
    Case("boundary", reach(0.5, 0.45), "no fall is certain as far as was tried", "holds"),
    Case("planted", accuracies(0.9, 0.8), "The intervals of all runs lie above chance"),
    Case("null", accuracies(0.1, 0.12), "The intervals of no run lie above chance"),
    Case("boundary", accuracies(0.9, None), "The interval of a alone lies above", "all runs"),
    Case("planted", RunCurves((run("a", 0.6),), {}), "full row length: a by step 1."),
    Case("null", RunCurves((run("a", 0.1),), {}), "full row length: a not by step 9."),
    Case("boundary", RunCurves((run("a", 0.1, ()),), {}), "a not evaluated by step 9."),
    Case(
        "planted",
        WidthCurves((setting(8, 0.5, 0.6), setting(16, 0.9, 0.9))),
        "the lowest that of d_model=8 (55.0 %, 95 %:",
    ),
    Case(
        "null",
        WidthCurves((setting(8, 0.5, 0.6), setting(16, 0.6, 0.5))),
        "The mean is that of d_model=8 (55.0 %, 95 %: 0.0 % … 100.0 %, 2 seeds), like 1 more.",
        "highest",
    ),
    Case("boundary", WidthCurves((setting(8, 0.5),)), "The mean is that of d_model=8", "lowest"),
    Case("planted", halves((4, 3, 5), (16, 12, 20)), "grows as d to the power 2.00."),
    Case("planted", halves((16, 12, 20), (4, 3, 5)), "changes as d to the power -2.00.", "grows"),
    Case("null", halves((8, 5, 12), (9, 6, 13)), "no change of the half point with d is certain"),
    Case("boundary", halves((8, 5, 12), (16, 12, 20)), "no change of the half point", "grows"),
    Case(
        "planted",
        AccuracyCosts((setting(8, 0.5), setting(16, 0.9, seconds=9.0))),
        "than: d_model=8 (50.0 % in 5 s); d_model=16 (90.0 % in 9 s).",
    ),
    Case(
        "null",
        AccuracyCosts((setting(8, 0.5), setting(16, 0.5, seconds=9.0))),
        "than: d_model=8 (50.0 % in 5 s).",
        "d_model=16",
    ),
    Case(
        "boundary",
        AccuracyCosts((setting(8, 0.5), setting(16, 0.9))),
        "than: d_model=16 (90.0 % in 5 s).",
        "d_model=8",
    ),
    Case(
        "planted",
        SettingCosts("training", {"a": {64: [0.002], 256: [0.009]}, "b": {256: [0.003]}}),
        "At 256 tokens a row, the medians of time forward and backward are 3 ms (b), 9 ms (a).",
    ),
    Case(
        "null",
        SettingCosts("memory", {"a": {64: [2**20]}, "b": {64: [2**20]}}),
        "are 1 MiB (a), 1 MiB (b).",
    ),
    Case(
        "boundary",
        SettingCosts("parameters", {"a": {64: [2e6]}, "b": {256: [3e6]}}),
        "At 256 tokens a row, the medians of parameters are 3 million (b).",
        "(a)",
    ),
    Case("planted", rates(0.1, 0.9, 0.2), "AM: 0.003 (window 0.003)", "at the end"),
    Case("null", rates(0, 0, 0), "AM: none of those that were tried works.", "0.001"),
    Case("null", rates(0.1, 0.1, 0.1), "AM: 0.001, at the end of what was tried (window 0.001 to"),
    Case("boundary", rates(0.1, 0.85, 0.9), "0.009, at the end of what was tried (window 0.003"),
    Case("planted", solving(2, 100.0), "AM: 2 of 3 solved, median 100 steps."),
    Case("null", solving(0, math.inf), "AM: 0 of 3 solved.", "median"),
    Case("boundary", solving(1, math.inf), "AM: 1 of 3 solved.", "median"),
    Case("planted", row(3, 2), "answers 2 of this row's 3 questions right. 1 of them is shown."),
    Case("null", row(3, 0), "answers 0 of this row's 3 questions right"),
    Case("boundary", row(1, 1), "answers 1 of this row's 1 question right.", "questions"),
    Case(
        "planted",
        Examples((Example(0, 4, 7, 2, 3, "masked away", 2, 0.1),)),
        "Masked away: row 0, position 4, token 7, 3 instead of 2.",
    ),
]
