"""Which factors shorten the first stage of training: a survival analysis of the steps to solve.

A run that ends unsolved shows only that solving takes longer, so its time is censored. Medians are
Kaplan–Meier medians. An exact log-rank test compares each factor with the baseline, with Holm's
correction over the factors.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import polars as pl

from analysis.plots.style import BLUE, MUTED, VERMILLION, new_figure
from analysis.statistics.holm import holm
from analysis.statistics.survival import (
    check_installed,
    compute_least_p,
    estimate_median,
    log_rank_p,
)
from analysis.sweeps.settings import describe_unfinished
from lab.studies.trainability import BASELINE

LEVEL = 0.05
"""Corrected p below which a factor differs from the baseline."""
ENDED = ("solved", "budget", "out of time", "diverged")
"""Statuses to analyze; a diverged run counts as unsolved after the most steps of any run."""
ROW = 19
"""Height of one factor's line in pixels."""


@dataclass(frozen=True)
class FactorEffect:
    """How a factor changes the number of steps until a run is solved.

    Attributes:
        factor: its name.
        steps: steps of each run, in the order of the seeds.
        solved: whether the run was solved by then; otherwise its time is censored.
        median: Kaplan–Meier median of the steps; infinite if fewer than half were solved.
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


def measure(table: pl.DataFrame) -> list[FactorEffect]:
    """Return the factors that were run, fastest first; without a baseline run, none has a p.

    Raises:
        MissingLibraryError: when lifelines is not installed.
    """
    check_installed()
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
    return sorted(effects, key=lambda effect: (effect.median, np.mean(effect.steps)))


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


def summarize(effects: Sequence[FactorEffect], without: int) -> list[str]:
    """Say which factors shorten the first stage and which do not.

    Args:
        effects: as `measure` returns.
        without: how many cells of the study have not ended.
    """
    baseline = next((effect for effect in effects if effect.factor == BASELINE), None)
    tested = [effect for effect in effects if effect.p is not None]
    if baseline is None or not tested:
        sentences = [
            "Nothing to compare yet: the baseline and at least one factor must be run first."
        ]
        return sentences + describe_unfinished(without)
    faster = [e for e in tested if e.counts and _is_faster(e, baseline)]
    slower = [e for e in tested if e.counts and not _is_faster(e, baseline)]
    same = [e for e in tested if not e.counts]
    reference = f"the baseline, {BASELINE} ({_format_steps(baseline.median)})"
    sentences = []
    if faster:
        listed = ", ".join(f"{e.factor} ({_format_steps(e.median)})" for e in faster)
        sentences.append(f"Solved sooner than {reference}: {listed}.")
    if slower:
        listed = ", ".join(f"{e.factor} ({_format_steps(e.median)})" for e in slower)
        sentences.append(f"Solved later than {reference}: {listed}.")
    if same:
        listed = ", ".join(f"{e.factor} ({_format_steps(e.median)})" for e in same)
        sentences.append(f"Not significantly different from {reference}: {listed}.")
    least = [compute_least_p(len(e.steps), len(baseline.steps)) * len(tested) for e in tested]
    blind = sum(p >= LEVEL for p in least)
    if blind:
        sentences.append(
            f"{blind} of {len(tested)} factors {'has' if blind == 1 else 'have'} too few runs to "
            "differ significantly from the "
            "baseline, whatever their effect: run more --seeds."
        )
    return sentences + describe_unfinished(without)


def _is_faster(effect: FactorEffect, baseline: FactorEffect) -> bool:
    """Whether a factor's runs are solved sooner, by median or, for equal medians, by mean."""
    ours, theirs = effect.median, baseline.median
    if ours == theirs:
        return float(np.mean(effect.steps)) < float(np.mean(baseline.steps))
    return ours < theirs


def _format_steps(median: float) -> str:
    return (
        f"{median:,.0f} steps"
        if math.isfinite(median)
        else "fewer than half of the runs were solved"
    )


def draw(effects: Sequence[FactorEffect]) -> go.Figure:
    """Draw each factor's runs and their median, fastest on top; triangles are unsolved runs."""
    names = [html.escape(effect.factor) for effect in effects]
    fig = new_figure(height=200 + ROW * len(effects))
    for solved, symbol, name in (
        (True, "circle-open", "a run, solved"),
        (False, "triangle-right-open", "a run, not solved by then"),
    ):
        points = [
            (steps, label)
            for effect, label in zip(effects, names, strict=True)
            for steps, ended in zip(effect.steps, effect.solved, strict=True)
            if ended is solved
        ]
        fig.add_scatter(
            x=[steps for steps, _ in points],
            y=[label for _, label in points],
            mode="markers",
            marker={"symbol": symbol, "color": MUTED, "size": 7},
            name=name,
            hovertemplate=f"%{{y}}: {name}, %{{x:,}} steps<extra></extra>",
        )
    for counts, color, symbol, name in (
        (False, BLUE, "line-ns", "median"),
        (True, VERMILLION, "diamond", "median, differs from the baseline"),
    ):
        known = [
            (effect, label)
            for effect, label in zip(effects, names, strict=True)
            if math.isfinite(effect.median) and effect.counts is counts
        ]
        fig.add_scatter(
            x=[effect.median for effect, _ in known],
            y=[label for _, label in known],
            mode="markers",
            marker={
                "symbol": symbol,
                "color": color,
                "size": 9,
                "line": {"width": 2.4, "color": color},
            },
            name=name,
            hovertemplate=f"%{{y}}: {name} %{{x:,}} steps<extra></extra>",
        )
    baseline = next((effect for effect in effects if effect.factor == BASELINE), None)
    if baseline is not None and math.isfinite(baseline.median):
        fig.add_vline(baseline.median, line={"color": MUTED, "dash": "dot"}, layer="below")
    fig.update_xaxes(title_text="steps until solved", tickformat=",", rangemode="tozero")
    fig.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], automargin="left", showgrid=False
    )
    # Four entries would cover the title, so the legend is below the axis.
    legend = {"y": -55 / (ROW * len(effects)), "yanchor": "top"}
    return fig.update_layout(legend=legend, margin_t=70, margin_b=130)
