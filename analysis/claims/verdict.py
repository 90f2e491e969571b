"""The verdict on a claim: holds, fails or undecided, and the power that its sweep has."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from analysis.claims.claim import Power
from analysis.claims.statistic import (
    Statistic,
    StatisticValue,
    average_seeds,
    compare,
    count_places,
    estimate,
    list_rates,
    score,
    select,
)
from analysis.statistics.seeds import bound_mean
from analysis.sweeps.settings import RATE
from lab.sweeps.outcome import ENDED

ClaimOutcome = Literal["holds", "fails", "undecided"]
DRAWS = 400
"""Planted sweeps that the power is computed from; its error is about 0.02."""


@dataclass(frozen=True)
class ClaimVerdict:
    """What a sweep says of a claim.

    Attributes:
        outcome: holds, fails or undecided.
        because: why, in a sentence.
        operational: whether it is undecided only because runs are missing or failed: nothing was
            learned about the claim.
        estimate: the statistic; NaN where runs are missing.
        runs: how many runs it rests on.
        unended: how many of the sweep's runs have not ended, or failed.
    """

    outcome: ClaimOutcome
    because: str
    operational: bool
    estimate: StatisticValue
    runs: int
    unended: int


@dataclass(frozen=True)
class Floor:
    """Accuracy that takes no learning, averaged over the places that a claim compares.

    Attributes:
        chance: of a guess, in [0, 1].
        shortcut_name: the best shortcut; empty without any.
        shortcut: its accuracy.
    """

    chance: float = 0.0
    shortcut_name: str = ""
    shortcut: float = 0.0


def decide(
    table: pl.DataFrame, statistic: Statistic, factors: Sequence[str], floor: Floor | None = None
) -> ClaimVerdict:
    """Return the verdict of a sweep's table.

    A claim holds where the whole interval lies on its side of the threshold, and fails where the
    whole interval lies on the other. It is undecided otherwise; where a run is missing or has
    failed; where the order of two settings changes between the learning rates chosen for them;
    where the setting compared with is so often right that no difference could reach the threshold;
    and where neither setting is surely further above chance than the threshold asks for.

    Args:
        table: a row for each run and row length.
        statistic: what decides.
        factors: the columns that tell the sweep's cells apart.
        floor: chance and the best shortcut at the places that are compared.
    """
    floor = floor or Floor()
    names = [*factors] + ["seq_len"] * ("seq_len" not in factors)
    places = [n for n in names if n not in {*statistic.of, *statistic.than, RATE, "seed"}]
    relevant = select(table, statistic.at)
    runs = relevant.select(list(factors)).n_unique()
    missing = relevant.filter(~pl.col("status").is_in(ENDED)).unique(list(factors))
    if len(missing) or not runs:
        nothing = StatisticValue(math.nan, math.nan, math.nan, 0, 0)
        counts = ", ".join(
            f"{count} {status}" for status, count in missing["status"].value_counts().rows()
        )
        why = f"not all runs have ended: {counts} of {runs}"
        return ClaimVerdict("undecided", why, True, nothing, runs, len(missing))
    found = estimate(table, statistic, places)
    outcome, because = judge(found, statistic, floor.chance)
    if found.best < floor.shortcut:
        because += (
            f"; no setting is right as often as the shortcut {floor.shortcut_name!r} "
            f"({found.best:.3g} and {floor.shortcut:.3g})"
        )
    change = _find_change(score(relevant), statistic, places)
    if outcome != "undecided" and change:
        outcome, because = "undecided", change
    return ClaimVerdict(outcome, because, False, found, runs, 0)


def judge(
    found: StatisticValue, statistic: Statistic, chance: float = 0.0
) -> tuple[ClaimOutcome, str]:
    """Return on which side of its threshold a statistic lies with its whole interval, and why."""
    line, above = statistic.threshold, statistic.side == "above"
    if not math.isfinite(found.value):
        return "undecided", "the table has no run of a setting that the claim names"
    if found.low > line or found.high < line:
        if found.surely - chance <= abs(line):
            return "undecided", (
                f"neither setting has surely learned enough to differ by {abs(line):g}: the better "
                f"one has an accuracy of {found.best:.3g} ({found.surely:.3g} or more), and chance "
                f"is {chance:.3g}"
            )
        side = "above" if found.low > line else "below"
        holds = (side == "above") is above
        if not holds and above and found.most <= line and found.high >= 0:
            return "undecided", (
                f"no difference above {line:g} was possible: the setting compared with leaves "
                f"{found.most:.2g} to gain, so harder rows are needed"
            )
        return ("holds" if holds else "fails"), f"the whole interval lies {side} {line:g}"
    if not math.isfinite(found.high - found.low):
        return "undecided", "one seed has no interval"
    return "undecided", f"the interval includes {line:g}"


def _find_change(table: pl.DataFrame, statistic: Statistic, places: list[str]) -> str:
    """Say at which learning rate two settings change sides, between the rates chosen for them."""
    if statistic.kind != "difference" or RATE not in table.columns:
        return ""
    chosen = [
        rate
        for values in (statistic.of, statistic.than)
        for rate in list_rates(table, values, places)
    ]
    sides = {}
    for rate in sorted(table[RATE].unique().to_list()):
        if min(chosen) <= rate <= max(chosen):
            at = table.filter(pl.col(RATE) == rate)
            ours, theirs = (
                average_seeds(select(at, values), places)
                for values in (statistic.of, statistic.than)
            )
            found = compare(ours, theirs, count_places(at, places))
            sides[rate] = found.value > statistic.threshold
    if len(set(sides.values())) < 2:
        return ""
    above = ", ".join(f"{rate:g}" for rate, side in sides.items() if side)
    return (
        "the order changes inside the window of learning rates: the difference is above the "
        f"threshold at {above} alone"
    )


def compute_power(statistic: Statistic, power: Power, seeds: int) -> float:
    """Return how often the verdict is "holds" if the effect is the assumed one.

    Sweeps are planted: the accuracies of `seeds` runs of each setting are normal about means that
    differ by the effect, or about the effect itself, and cut to [0, 1].
    """
    rng = np.random.default_rng(0)
    held, high, low = 0, 0.5 + power.effect / 2, 0.5 - power.effect / 2
    for _ in range(DRAWS):
        if statistic.kind == "difference":
            ours, theirs = (
                np.clip(rng.normal(mean, power.spread, seeds), 0, 1) for mean in (high, low)
            )
            found = compare(ours, theirs, 1)
        else:
            rows = np.clip(rng.normal(power.effect, power.spread, seeds), 0, 1)
            found = _bound_planted(rows)
        held += judge(found, statistic)[0] == "holds"
    return held / DRAWS


def _bound_planted(values: np.ndarray) -> StatisticValue:
    if len(values) < 2:
        return StatisticValue(float(values.mean()), -math.inf, math.inf, len(values), 1)
    return StatisticValue(float(values.mean()), *bound_mean(values.tolist()), len(values), 1)
