"""Findings of sweeps, claims and studies, planted by hand."""

import math
from typing import Any

import numpy as np

from analysis.claims.verdict import SettingCosts
from analysis.studies.recall import MaskComparison, MaskGain, PaperComparison, Setting
from analysis.studies.trainability import FactorEffect, FactorEffects
from analysis.sweeps.capacity import CapacityCurve, CapacityCurves
from analysis.sweeps.results import (
    AccuracyCosts,
    RateCurve,
    RateCurves,
    SolvingCurve,
    SolvingCurves,
    WidthCurves,
)
from analysis.sweeps.settings import SettingResult
from lab.studies.trainability import BASELINE
from tests.unit.analysis.case import Case


def setting(
    width: int, *shares: float, seconds: float = 5.0, state: int | None = None
) -> SettingResult:
    n = len(shares)
    rest: Any = ((9,) * n, (False,) * n, (seconds,) * n, 99, state)
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
    steps, share = np.array([0.0, 9.0]), np.array([1.0, 0.5])
    return SolvingCurves((SolvingCurve("AM", steps, share, 3, solved, median, (1.0, 9.0)),))


def recalled(mixer: str, accuracy: float) -> PaperComparison:
    """Return a setting at 512 tokens and d 64, where the paper's attention has 0.65."""
    return PaperComparison((Setting(mixer, 512, 64, "lab", (0, 1), (accuracy, accuracy), 0),))


def masked(gain: float, p: float, *, blind: bool = False) -> MaskComparison:
    return MaskComparison((MaskGain("soft mask", gain, 12, p, blind),), 3, 4)


def factor(name: str, *steps: int, p: float | None = None) -> FactorEffect:
    median = float(np.median(steps))
    return FactorEffect(name, steps, (True,) * len(steps), median, (1.0, math.inf), 9.0, p, p)


def factors(*steps: int, p: float) -> FactorEffects:
    baseline = factor(BASELINE, *range(300, 318))
    return FactorEffects((factor("other", *steps, p=p), baseline))


FEW = "with too few runs to differ, whatever their effect: 0."
CASES = [
    Case(
        "planted",
        WidthCurves((setting(8, 0.5, 0.6), setting(16, 0.9, 0.9))),
        "The lowest mean accuracy is 55.0 % (d_model=8), the highest 90.0 % (d_model=16).",
    ),
    Case(
        "null",
        WidthCurves((setting(8, 0.5, 0.6), setting(16, 0.6, 0.5))),
        "The mean accuracy is 55.0 % in every setting.",
        "highest 55",
    ),
    Case("boundary", WidthCurves((setting(8, 0.5),)), "50.0 % in every setting.", "lowest"),
    Case("planted", halves((4, 3, 5), (16, 12, 20)), "it changes as d to the power 2.00."),
    Case("planted", halves((16, 12, 20), (4, 3, 5)), "it changes as d to the power -2.00."),
    Case("planted", halves((4, 0.0, math.inf)), "d=8 1.000 0.000 4.0 below 2 … above 64 0.00"),
    Case("null", halves((8, 5, 12), (9, 6, 13)), "2 of 2; no change of it is certain.", "power"),
    Case("null", halves((65, 60, 70)), "0 of 1; no change of it is certain.", "65"),
    Case("boundary", halves((8, 5, 12), (16, 12, 20)), "no change of it is certain.", "power"),
    Case("boundary", halves((64, 60, 64)), "1 of 1;", "above"),
    Case("boundary", halves((2, 2, 3)), "1 of 1;", "below"),
    Case(
        "boundary",
        CapacityCurves((CapacityCurve("d=8", 8.0, np.array([2]), np.array([0.5])),), "d"),
        "too few runs",
    ),
    Case(
        "planted",
        AccuracyCosts((setting(8, 0.5), setting(16, 0.9, seconds=9.0))),
        "cost: 2 of 2; the highest mean, 90.0 %, takes 9 s (d_model=16).",
    ),
    Case(
        "null",
        AccuracyCosts((setting(8, 0.5), setting(16, 0.5, seconds=9.0))),
        "cost: 1 of 2; the highest mean, 50.0 %, takes 5 s (d_model=8).",
        "d_model=16",
    ),
    Case(
        "boundary",
        AccuracyCosts((setting(8, 0.5), setting(16, 0.9))),
        "cost: 1 of 2; the highest mean, 90.0 %, takes 5 s (d_model=16).",
        "d_model=8",
    ),
    Case(
        "planted",
        AccuracyCosts(
            (
                setting(8, 0.5, state=64),
                setting(16, 0.4, seconds=9.0, state=16),
                setting(32, 0.9, seconds=9.0, state=512),
                setting(64, 0.3, seconds=9.0, state=512),
            )
        ),
        "mean, 90.0 %, takes 9 s (d_model=32). By bytes of state: 3 of 4.",
    ),
    Case(
        "boundary",
        AccuracyCosts((setting(8, 0.5, state=64), setting(16, 0.9, state=64), setting(32, 0.9))),
        "takes 5 s (d_model=16).",
        "bytes of state",
    ),
    Case(
        "planted",
        SettingCosts("training", {"a": {64: [0.002], 256: [0.009]}, "b": {256: [0.003]}}),
        "At 256 tokens a row, the median of time forward and backward goes from 3 ms (b) to 9 ms "
        "(a).",
    ),
    Case(
        "null",
        SettingCosts("memory", {"a": {64: [2**20]}, "b": {64: [2**20]}}),
        "goes from 1 MiB (a) to 1 MiB (b).",
    ),
    Case(
        "boundary",
        SettingCosts("parameters", {"a": {64: [2e6]}, "b": {256: [3e6]}}),
        "goes from 3 million (b) to 3 million (b).",
        "(a)",
    ),
    Case("planted", rates(0.1, 0.9, 0.2), "AM 0.003 0.003 … 0.003 no"),
    Case("null", rates(0, 0, 0), "settings for which none works: 1.", "0.001"),
    Case("null", rates(0.1, 0.1, 0.1), "AM 0.001 0.001 … 0.009 yes"),
    Case("boundary", rates(0.1, 0.85, 0.9), "AM 0.009 0.003 … 0.009 yes"),
    Case("planted", solving(2, 100.0), "2 of 3; the smallest median is 100 steps (AM)."),
    Case("null", solving(0, math.inf), "solved: 0 of 3, in no setting half of them.", "median is"),
    Case("boundary", solving(1, math.inf), "AM 1 of 3 – 1 … 9", "median is"),
    Case("planted", recalled("attention", 0.99), "in the paper: 1 of 1; less accurate: 0;"),
    Case("null", recalled("attention", 0.65), "in the paper: 0 of 1; less accurate: 0;"),
    Case("boundary", recalled("attention", 0.62), "attention 1 0 1 -0.03 at T 512, d 64"),
    Case("boundary", recalled("Cheems pair", 0.62), "in the paper: 0 of 0; less accurate: 0;"),
    Case("planted", masked(0.3, 0.001), "attention without a mask: 1 of 1; worse: 0;"),
    Case("planted", masked(-0.3, 0.001), "attention without a mask: 0 of 1; worse: 1;"),
    Case("null", masked(0.3, 0.05), "soft mask +0.300 12 0.05 not significant"),
    Case("boundary", masked(0.3, 0.001, blind=True), "too few pairs", "1 of 1"),
    Case("planted", factors(100, 110, 120, p=0.01), f": 1 of 1; later: 0; {FEW}"),
    Case("planted", factors(600, 610, 620, p=0.01), f": 0 of 1; later: 1; {FEW}"),
    Case("null", factors(300, 310, 320, p=0.05), f": 0 of 1; later: 0; {FEW}"),
    Case("boundary", factors(300, p=1.0), ": 0 of 1; later: 0; with too few runs to differ, what"),
    Case("boundary", FactorEffects((factor("other", 9),)), "There is nothing to compare:", "later"),
]
