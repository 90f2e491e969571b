"""Which factors shorten the first stage of training: a survival analysis of the steps to solve.

A run that ends unsolved shows only that solving takes longer, so its time is censored. Medians are
Kaplan–Meier medians. An exact log-rank test compares each factor with the baseline, with Holm's
correction over the factors.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import polars as pl

from analysis.base import Finding, Table
from analysis.figures import Axis, Dots, Pairs, pairs
from analysis.statistics.comparisons import compute_least_p, estimate_median, holm, log_rank_p
from analysis.sweeps.results import format_median
from lab.studies.trainability import BASELINE

LEVEL = 0.05
"""Corrected p below which a factor differs from the baseline."""
ENDED = ("solved", "budget", "out of time", "diverged")
"""Statuses to analyze; a diverged run counts as unsolved after the most steps of any run."""


@dataclass(frozen=True)
class FactorEffect:
    """How a factor changes the number of steps until a run is solved.

    Attributes:
        steps: steps of each run, in the order of the seeds.
        solved: whether the run was solved by then; otherwise its time is censored.
        interval: 95 % interval of the median; an infinite end is unknown.
        rows: Kaplan–Meier median of the training rows; unlike steps, it reflects the batch size.
        p: of the log-rank test against the baseline; None for the baseline itself.
        corrected: p after Holm's correction over all factors.
    """

    factor: str
    steps: tuple[int, ...]
    solved: tuple[bool, ...]
    median: float
    interval: tuple[float, float]
    rows: float
    p: float | None = None
    corrected: float | None = None

    @property
    def counts(self) -> bool:
        """Whether the factor differs significantly from the baseline."""
        return self.corrected is not None and self.corrected < LEVEL


@dataclass(frozen=True)
class FactorEffects(Finding):
    """The factors that were run, fastest first.

    Attributes:
        effects: of each; without a run of the baseline, none has a p.
    """

    effects: tuple[FactorEffect, ...]
    title = "Steps until solved, by changed setting"
    reading = (
        "A ring is a run that was solved, a triangle one that was not by then. Medians are Kaplan "
        "and Meier's, and missing where fewer than half of the runs were solved. The dotted line "
        "is the baseline's."
    )

    @property
    def baseline(self) -> FactorEffect | None:
        """The effect of no change; None if the baseline was not run."""
        return next((effect for effect in self.effects if effect.factor == BASELINE), None)

    @property
    def says(self) -> str:
        """How many factors are solved sooner and later, and how many have too few runs."""
        base, tested = self.baseline, [e for e in self.effects if e.p is not None]
        if base is None or not tested:
            return "There is nothing to compare: run the baseline and at least one factor first."
        sooner = [_is_faster(effect, base) for effect in tested if effect.counts]
        least = [compute_least_p(len(e.steps), len(base.steps)) * len(tested) for e in tested]
        return (
            f"Factors that are solved significantly sooner than the baseline, {BASELINE}: "
            f"{sum(sooner)} of {len(tested)}; later: {len(sooner) - sum(sooner)}; with too few "
            f"runs to differ, whatever their effect: {sum(p >= LEVEL for p in least)}."
        )

    def numbers(self) -> Table:
        """Return the median steps of each factor, and its p."""
        rows = [
            (
                e.factor,
                *format_median(e.median, e.interval),
                f"{e.rows:,.0f}" if math.isfinite(e.rows) else "–",
                f"{sum(e.solved)} of {len(e.solved)}",
                "" if e.p is None else f"{e.p:.2g}",
                "" if e.corrected is None else f"{e.corrected:.2g}",
            )
            for e in self.effects
        ]
        heads = ("factor", "median steps", "95 %", "rows", "solved", "p", "p (Holm)")
        return Table(heads, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw each factor's runs and their median, fastest on top; triangles are unsolved runs."""
        effects, level = self.effects, self.baseline and self.baseline.median
        medians = np.array([e.median if math.isfinite(e.median) else math.nan for e in effects])
        counts = np.array([effect.counts for effect in effects])
        steps = np.array([steps for effect in effects for steps in effect.steps])
        solved = np.array([solved for effect in effects for solved in effect.solved])
        line = np.repeat(np.arange(len(effects)), [len(effect.steps) for effect in effects])
        other = np.where(counts, medians, np.nan)
        dots = [
            Dots("median", np.where(counts, np.nan, medians)),
            Dots("median, differs from the baseline", other, look="diamond"),
            Dots("a run, solved", steps[solved], look="run", lines=line[solved]),
            Dots("a run, not solved by then", steps[~solved], look="unsolved", lines=line[~solved]),
        ]
        levels = {"baseline": level} if level and math.isfinite(level) else {}
        panel = Pairs(dots, Axis("steps until solved", "count"), levels=levels)
        return pairs([effect.factor for effect in effects], panel).update_xaxes(rangemode="tozero")


def measure(table: pl.DataFrame) -> tuple[FactorEffects, ...]:
    """Return the effects of the factors that were run; nothing if none was."""
    run = table.filter(pl.col("status").is_in(ENDED) & pl.col("steps").is_not_null())
    most = run["steps"].max()
    diverged = pl.col("status") == "diverged"
    run = run.with_columns(steps=pl.when(diverged).then(pl.lit(most)).otherwise("steps"))
    groups = {str(factor): rows for (factor,), rows in run.group_by("factor", maintain_order=True)}
    effects = [_estimate_effect(factor, rows) for factor, rows in groups.items()]
    baseline = groups.get(BASELINE)
    if baseline is not None:
        others = [effect for effect in effects if effect.factor != BASELINE]
        known = baseline["steps"].to_list(), baseline["solved"].to_list()
        ps = [log_rank_p(effect.steps, effect.solved, *known) for effect in others]
        tested = {
            effect.factor: replace(effect, p=p, corrected=corrected)
            for effect, p, corrected in zip(others, ps, holm(ps), strict=True)
        }
        effects = [tested.get(effect.factor, effect) for effect in effects]
    effects.sort(key=lambda effect: (effect.median, np.mean(effect.steps)))
    return (FactorEffects(tuple(effects)),) if effects else ()


def _estimate_effect(factor: str, rows: pl.DataFrame) -> FactorEffect:
    solved = rows["solved"].to_list()
    median, interval = estimate_median(rows["steps"].to_list(), solved)
    return FactorEffect(
        factor,
        tuple(rows["steps"]),
        tuple(solved),
        median,
        interval,
        estimate_median(rows["rows"].to_list(), solved)[0],
    )


def _is_faster(effect: FactorEffect, baseline: FactorEffect) -> bool:
    """Whether a factor's runs are solved sooner, by median or, for equal medians, by mean."""
    ours, theirs = effect.median, baseline.median
    if ours == theirs:
        return float(np.mean(effect.steps)) < float(np.mean(baseline.steps))
    return ours < theirs
