"""Steps until a run is solved: Kaplan–Meier curves, in which unsolved runs are censored."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl
from jaxtyping import Float

from analysis.base import Finding, NotApplicableError, Words
from analysis.plots.style import new_figure
from analysis.statistics.survival import check_installed, estimate_curve, estimate_median
from analysis.sweeps.lines import HEIGHT, SHARES, choose_look, put_legend_below
from analysis.sweeps.settings import RATE, collect_settings


@dataclass(frozen=True)
class SolvingCurve:
    """One setting's share of unsolved runs by steps.

    Attributes:
        name: what tells the setting from others.
        steps: at which the share changes, from 0.
        unsolved: the share from each of these steps on.
        runs: how many there are.
        solved: how many of them were solved.
        median: steps after which half are solved; infinite if fewer were.
        interval: its 95 % interval.
    """

    name: str
    steps: Float[np.ndarray, " n"]
    unsolved: Float[np.ndarray, " n"]
    runs: int
    solved: int
    median: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class SolvingCurves(Finding):
    """Survival curves of steps to solve, a line for each setting."""

    curves: tuple[SolvingCurve, ...]

    def describe(self) -> Words:
        """Name the median of each setting."""
        parts = []
        for curve in sorted(self.curves, key=lambda curve: curve.median):
            median = f"median {curve.median:,.0f} steps" if np.isfinite(curve.median) else ""
            solved = f"{curve.solved} of {curve.runs} solved"
            parts.append(f"{curve.name}: {', '.join(filter(None, (solved, median)))}")
        says = f"{'; '.join(parts)}."
        return Words(
            "Steps until solved",
            says,
            "The share of runs that are not solved yet on validation rows, by Kaplan and Meier: "
            "runs that end unsolved count up to their last step, and runs that diverge as unsolved "
            "up to the longest run of the setting. A setting whose runs all diverged has no line. "
            "Each line falls at each run that is solved; with few seeds a step is large.",
            f"Falling lines of the share of unsolved runs by steps. {says}",
        )

    def draw(self) -> go.Figure:
        """Draw a falling line for each setting."""
        fig = new_figure(height=HEIGHT)
        for number, curve in enumerate(self.curves):
            look, name = choose_look(number), html.escape(curve.name)
            fig.add_scatter(
                x=curve.steps,
                y=curve.unsolved,
                mode="lines+markers",
                line={"shape": "hv", "color": look["color"], "dash": look["dash"], "width": 2},
                marker={"symbol": look["symbol"], "size": 5},
                name=name,
                hovertemplate=f"{name}: %{{y:.0%}} unsolved after %{{x:,}}<extra></extra>",
            )
        fig.update_xaxes(title_text="training steps", tickformat=",", rangemode="tozero")
        fig.update_yaxes(title_text="share not solved yet", **SHARES)
        return put_legend_below(fig, [curve.name for curve in self.curves], HEIGHT)


def measure(table: pl.DataFrame) -> Sequence[SolvingCurves]:
    """Return the curves of a sweep's table.

    Raises:
        NotApplicableError: when no run was solved, or no setting has two runs.
        MissingLibraryError: when lifelines is not installed.
    """
    settings = [s for s in collect_settings(table) if s.seeds]
    if not any(any(s.solved) for s in settings):
        raise NotApplicableError("no run was solved")
    if all(len(s.seeds) + s.diverged < 2 for s in settings):
        raise NotApplicableError("each setting has one run")
    check_installed()
    found = []
    for setting in settings:
        taken = [*setting.steps, *[max(setting.steps)] * setting.diverged]
        solved = [*setting.solved, *[False] * setting.diverged]
        steps, unsolved = estimate_curve(taken, solved)
        median, interval = estimate_median(taken, solved)
        found.append(
            SolvingCurve(
                name=setting.name([RATE]),
                steps=steps,
                unsolved=unsolved,
                runs=len(taken),
                solved=sum(solved),
                median=median,
                interval=interval,
            )
        )
    return [SolvingCurves(tuple(found))]
