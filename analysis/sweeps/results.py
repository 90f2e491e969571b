"""What a sweep's table shows: accuracy by width, learning rate and cost, and steps until solved."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl
from jaxtyping import Float

from analysis.base import Finding, NotApplicableError, Table
from analysis.figures import Axis, Curves, Line, curves, offer_views
from analysis.figures.theme import MUTED
from analysis.statistics.comparisons import estimate_curve, estimate_median
from analysis.sweeps import capacity
from analysis.sweeps.settings import (
    RATE,
    SettingResult,
    choose_rates,
    collect_settings,
    list_factors,
    name_values,
    select_results,
)
from analysis.words import percent
from lab.intervals import bound_mean
from lab.training.records import name_ending

WIDTH, LENGTH = "d_model", "seq_len"
CLOSE = 0.05
"""Rates whose mean validation accuracy is within this of the chosen one's form the window."""
ACCURACY = Axis("test accuracy", "share")
PANEL = 210
"""Height of a panel, where there are several, px."""


@dataclass(frozen=True)
class WidthCurves(Finding):
    """Accuracy by width: a panel for each row length, a line for each setting."""

    settings: tuple[SettingResult, ...]
    title = "Accuracy by width"
    reading = (
        "A point is the mean over seeds on test rows, at the learning rate that is best on "
        "validation rows. Whiskers are 95 % intervals: over seeds, and over rows where those "
        "are wider. Intervals that overlap show no difference."
    )

    @property
    def says(self) -> str:
        """The lowest and the highest mean."""
        least, most = (pick(self.settings, key=lambda s: s.mean) for pick in (min, max))
        if least.mean == most.mean:
            return f"The mean accuracy is {percent(most.mean)} in every setting."
        return (
            f"The lowest mean accuracy is {percent(least.mean)} ({least.name()}), the highest "
            f"{percent(most.mean)} ({most.name()})."
        )

    def figure(self) -> go.Figure:
        """Draw a panel for each row length."""
        lines = {s.name([WIDTH, LENGTH, RATE]): None for s in self.settings}
        lengths, panels = {s.factors.get(LENGTH) for s in self.settings}, []
        for length in sorted(lengths, key=lambda length: length or 0):
            groups: dict[str, list[SettingResult]] = {name: [] for name in lines}
            for setting in sorted(self.settings, key=lambda s: s.factors[WIDTH]):
                if setting.factors.get(LENGTH) == length:
                    groups[setting.name([WIDTH, LENGTH, RATE])].append(setting)
            title = "" if length is None else f"{length:,} tokens"
            joined = [_join(name, group) for name, group in groups.items() if group]
            panels.append(Curves(joined, ACCURACY, title, height=PANEL))
        widths = sorted({s.factors[WIDTH] for s in self.settings})
        x = Axis(WIDTH, scale="log", ticks={width: str(width) for width in widths})
        return curves(panels, x, across=2)


def _join(name: str, settings: Sequence[SettingResult]) -> Line:
    """Return a line through the settings, by width."""
    return Line(
        name,
        np.array([s.factors[WIDTH] for s in settings], np.float64),
        np.array([s.mean for s in settings]),
        np.array([s.interval for s in settings]).reshape(-1, 2),
        notes=[s.name() for s in settings],
    )


def measure_widths(table: pl.DataFrame) -> Sequence[WidthCurves]:
    """Return accuracy by width of a sweep's table.

    Raises:
        NotApplicableError: when the runs that have ended have one width.
    """
    settings = tuple(s for s in collect_settings(table) if s.seeds and s.factors.get(WIDTH))
    if len({s.factors[WIDTH] for s in settings}) < 2:
        raise NotApplicableError("the runs that have ended have one width")
    return [WidthCurves(settings)]


@dataclass(frozen=True)
class RateCurve:
    """One setting at several learning rates.

    Attributes:
        rates: learning rates, ascending.
        validation: mean accuracy on validation rows at each rate; 0 where all runs diverged.
        accuracies: of each run on test rows, at each rate.
        chosen: the rate that is best on validation rows, of those with the most seeds.
    """

    name: str
    rates: tuple[float, ...]
    validation: tuple[float, ...]
    accuracies: tuple[tuple[float, ...], ...]
    chosen: float

    @property
    def works(self) -> bool:
        """Whether any answer is right at any rate."""
        return max(self.validation) > 0

    @property
    def window(self) -> tuple[float, float]:
        """The lowest and highest rate without a gap around the chosen one that are close to it."""
        at = self.rates.index(self.chosen)
        least = self.validation[at] - CLOSE
        low = high = at
        while low > 0 and self.validation[low - 1] >= least:
            low -= 1
        while high < len(self.rates) - 1 and self.validation[high + 1] >= least:
            high += 1
        return self.rates[low], self.rates[high]

    @property
    def at_end(self) -> bool:
        """Whether the chosen rate is the lowest or the highest of those that were tried."""
        return self.works and self.chosen in (self.rates[0], self.rates[-1])


@dataclass(frozen=True)
class RateCurves(Finding):
    """Accuracy by learning rate, a line for each setting."""

    curves: tuple[RateCurve, ...]
    title = "Accuracy by learning rate"
    reading = (
        "A point is the mean over seeds on test rows; whiskers are 95 % intervals. The ring is "
        "the rate that is best on validation rows, of those with the most seeds; the window "
        f"holds the rates within {CLOSE} of it there. A best rate at the end of what was tried "
        "asks for further rates."
    )

    @property
    def says(self) -> str:
        """For how many settings the best rate may lie outside, and for how many none works."""
        ends, dead = sum(c.at_end for c in self.curves), sum(not c.works for c in self.curves)
        return (
            "Settings whose best learning rate on validation rows is at the end of what was "
            f"tried: {ends} of {len(self.curves)}; settings for which none works: {dead}."
        )

    def numbers(self) -> Table:
        """Return the chosen rate and the window of each setting."""
        rows = [
            (c.name, f"{c.chosen:g}", "{:g} … {:g}".format(*c.window), "yes" if c.at_end else "no")
            if c.works
            else (c.name, "none works", "–", "no")
            for c in self.curves
        ]
        return Table(("setting", "best rate", "window", "at the end"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a line for each setting, and a ring around the chosen rate."""
        lines, rings = [], []
        for curve in self.curves:
            known = [i for i, shares in enumerate(curve.accuracies) if shares]
            rates = np.array(curve.rates)[known]
            means = np.array([np.mean(curve.accuracies[i]) for i in known])
            ends = np.array([bound_mean(curve.accuracies[i]) for i in known]).reshape(-1, 2)
            lines.append(Line(curve.name, rates, means, ends))
            rings += [(curve.chosen, mean) for mean in means[rates == curve.chosen]]
        tried = sorted({rate for curve in self.curves for rate in curve.rates})
        x = Axis("learning rate", scale="log", ticks={rate: f"{rate:g}" for rate in tried})
        return curves([Curves(lines, ACCURACY)], x).add_scatter(
            x=[rate for rate, _ in rings],
            y=[mean for _, mean in rings],
            mode="markers",
            marker={"symbol": "circle-open", "size": 15, "line": {"width": 1.5}, "color": MUTED},
            showlegend=False,
            hoverinfo="skip",
        )


def measure_rates(table: pl.DataFrame) -> Sequence[RateCurves]:
    """Return accuracy by learning rate of a sweep's table.

    Raises:
        NotApplicableError: when the runs that have ended have one learning rate.
    """
    ended = select_results(table)
    numeric = RATE in ended.columns and ended[RATE].dtype.is_numeric()
    if not numeric or ended[RATE].n_unique() < 2:
        raise NotApplicableError("the runs that have ended have one learning rate")
    keys = [name for name in list_factors(table) if name != RATE]
    groups = ended.group_by(keys, maintain_order=True) if keys else [((), ended)]
    found = []
    for key, rows in groups:
        by_rate = {
            float(str(rate)): group
            for (rate,), group in rows.sort(RATE).group_by(RATE, maintain_order=True)
        }
        found.append(
            RateCurve(
                name=name_values(dict(zip(keys, key, strict=True))),
                rates=tuple(by_rate),
                validation=tuple(
                    float(np.mean(g["validation"].fill_null(0.0).to_numpy()))
                    for g in by_rate.values()
                ),
                accuracies=tuple(tuple(g["accuracy"].drop_nulls()) for g in by_rate.values()),
                chosen=choose_rates(rows, keys)[RATE][0],
            )
        )
    return [RateCurves(tuple(found))]


@dataclass(frozen=True)
class SolvingCurve:
    """One setting's share of unsolved runs by steps.

    Attributes:
        steps: at which the share changes, from 0.
        unsolved: the share from each of these steps on.
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
    title = "Steps until solved"
    reading = (
        "The share of runs that are not solved yet on validation rows, by Kaplan and Meier: "
        "runs that end unsolved count up to their last step, and runs that diverge as unsolved "
        "up to the longest run of the setting. A setting whose runs all diverged has no line. "
        "Each line falls at each run that is solved; with few seeds a step is large."
    )

    @property
    def says(self) -> str:
        """How many runs were solved, and the setting with the smallest median."""
        first = min(self.curves, key=lambda curve: curve.median)
        solved, runs = (sum(getattr(c, name) for c in self.curves) for name in ("solved", "runs"))
        if np.isinf(first.median):
            return f"Runs that were solved: {solved} of {runs}, in no setting half of them."
        return (
            f"Runs that were solved: {solved} of {runs}; the smallest median is "
            f"{first.median:,.0f} steps ({first.name})."
        )

    def numbers(self) -> Table:
        """Return the median of each setting, the smallest first."""
        rows = [
            (
                c.name,
                f"{c.solved} of {c.runs}",
                *format_median(c.median, c.interval),
            )
            for c in sorted(self.curves, key=lambda curve: curve.median)
        ]
        return Table(("setting", "solved", "median steps", "95 %"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a falling line for each setting."""
        lines = [Line(c.name, c.steps, c.unsolved, shape="stairs") for c in self.curves]
        share = Axis("share not solved yet", "share")
        return curves([Curves(lines, share)], Axis("training steps", "count"))


def format_median(median: float, interval: tuple[float, float]) -> tuple[str, str]:
    """Format a median of steps and its interval; "–" stands for what is not known."""
    half, low, high = (f"{n:,.0f}" if np.isfinite(n) else "–" for n in (median, *interval))
    return half, "–" if low == high == "–" else f"{low} … {high}"


def measure_solving(table: pl.DataFrame) -> Sequence[SolvingCurves]:
    """Return the survival curves of a sweep's table.

    Raises:
        NotApplicableError: when no run was solved, or no setting has two runs.
    """
    settings = [s for s in collect_settings(table) if s.seeds]
    if not any(any(s.solved) for s in settings):
        raise NotApplicableError("no run was solved")
    if all(len(s.seeds) + s.diverged < 2 for s in settings):
        raise NotApplicableError("each setting has one run")
    found = []
    for setting in settings:
        taken = [*setting.steps, *[max(setting.steps)] * setting.diverged]
        solved = [*setting.solved, *[False] * setting.diverged]
        found.append(
            SolvingCurve(
                setting.name([RATE]),
                *estimate_curve(taken, solved),
                len(taken),
                sum(solved),
                *estimate_median(taken, solved),
            )
        )
    return [SolvingCurves(tuple(found))]


COSTS: dict[str, Callable[[SettingResult], float | None]] = {
    "seconds of training": lambda setting: setting.cost,
    "bytes of state": lambda setting: setting.state_bytes,
    "parameters": lambda setting: setting.parameters,
}
"""What a setting costs, None where it is not known. The first is always drawn, and others where
they differ."""


@dataclass(frozen=True)
class AccuracyCosts(Finding):
    """Accuracy against seconds of training, bytes of state and parameters."""

    settings: tuple[SettingResult, ...]
    title = "Accuracy by cost"
    reading = (
        "Across, as the menu says: mean seconds of training of a run, without evaluations, as "
        "measured beside whatever else the machine did; the bytes that decoding keeps of one row "
        "after its last token; or parameters. Up: mean test accuracy with its 95 % interval. The "
        "line joins the settings that are the most accurate at their cost, which ✓ marks in the "
        "table."
    )

    @property
    def costs(self) -> list[str]:
        """The costs by which settings are compared, of `COSTS`."""
        first, *others = COSTS
        values = {name: {COSTS[name](s) for s in self.settings} - {None} for name in others}
        return [first, *(name for name in others if len(values[name]) > 1)]

    def find_frontier(self, cost: str) -> list[SettingResult]:
        """Return the settings than which none is both cheaper and as accurate, cheapest first."""
        found: list[SettingResult] = []
        for setting in sorted(self._list_known(cost), key=lambda s: (COSTS[cost](s), -s.mean)):
            if not found or setting.mean > found[-1].mean:
                found.append(setting)
        return found

    def _list_known(self, cost: str) -> list[SettingResult]:
        return [setting for setting in self.settings if COSTS[cost](setting) is not None]

    @property
    def says(self) -> str:
        """How many settings are the most accurate at each cost, and the best of them."""
        first, *others = (
            f"{len(self.find_frontier(cost))} of {len(self._list_known(cost))}"
            for cost in self.costs
        )
        best = self.find_frontier(self.costs[0])[-1]
        more = [f" By {cost}: {count}." for cost, count in zip(self.costs[1:], others, strict=True)]
        return (
            f"Settings that are the most accurate at their cost: {first}; the highest mean, "
            f"{percent(best.mean)}, takes {best.cost:,.0f} s ({best.name([RATE])}).{''.join(more)}"
        )

    def numbers(self) -> Table:
        """Return the settings that are the most accurate at a cost, least seconds first."""
        frontiers = {cost: self.find_frontier(cost) for cost in self.costs}
        shown = [s for s in self.settings if any(s in found for found in frontiers.values())]
        rows = [
            (
                s.name([RATE]),
                percent(s.mean),
                *(_format_cost(COSTS[c](s)) + " ✓" * (s in best) for c, best in frontiers.items()),
            )
            for s in sorted(shown, key=lambda s: s.cost)
        ]
        return Table(("setting", "mean accuracy", *self.costs), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a point for each setting, and the line of the most accurate."""
        return offer_views({f"against {cost}": self._draw(cost) for cost in self.costs})

    def _draw(self, cost: str) -> go.Figure:
        def place(settings: Sequence[SettingResult]) -> tuple[np.ndarray, np.ndarray]:
            costs = np.array([COSTS[cost](s) for s in settings], np.float64)
            return costs, np.array([s.mean for s in settings])

        lines = [Line("most accurate at its cost", *place(self.find_frontier(cost)), look=-1)]
        known = self._list_known(cost)
        for i, name in enumerate(dict.fromkeys(map(_name_family, self.settings))):
            alike = [s for s in known if _name_family(s) == name]
            ends = np.array([s.interval for s in alike]).reshape(-1, 2)
            notes = [s.name([RATE]) for s in alike]
            lines.append(Line(name, *place(alike), ends, "points", i, notes))
        return curves([Curves(lines, ACCURACY)], Axis(cost, scale="log"))


def _name_family(setting: SettingResult) -> str:
    """Return what is text among a setting's factors, such as its stack; all of them if none is."""
    texts = {name: value for name, value in setting.factors.items() if isinstance(value, str)}
    return name_values(texts) if texts else setting.name([RATE])


def _format_cost(cost: float | None) -> str:
    return "–" if cost is None else f"{cost:,.1f}" if isinstance(cost, float) else f"{cost:,}"


def measure_costs(table: pl.DataFrame) -> Sequence[AccuracyCosts]:
    """Return accuracy by cost of a sweep's table.

    Raises:
        NotApplicableError: when fewer than two settings have ended.
    """
    settings = tuple(s for s in collect_settings(table) if s.seeds and s.cost > 0)
    if len(settings) < 2:
        raise NotApplicableError("fewer than two settings have ended")
    return [AccuracyCosts(settings)]


FIGURES: dict[str, Callable[[pl.DataFrame], Sequence[Finding]]] = {
    "widths": measure_widths,
    "capacity": capacity.measure,
    "rates": measure_rates,
    "survival": measure_solving,
    "costs": measure_costs,
}
"""The figures by name, in their order on the page."""


@dataclass(frozen=True)
class SweepResults:
    """What a sweep found.

    Attributes:
        missing: why each of the other figures is not there.
        errors: the runs that failed or diverged, by which of the two and the error.
    """

    settings: tuple[SettingResult, ...]
    findings: dict[str, tuple[Finding, ...]]
    missing: dict[str, str]
    counts: dict[str, int]
    errors: dict[str, tuple[str, ...]]

    def summarize(self) -> str:
        """Say which setting is best, and how many runs ended how."""
        total = sum(self.counts.values())
        parts = ", ".join(f"{count} {name_ending(status)}" for status, count in self.counts.items())
        return f"{self._name_best()}{total} {'run' if total == 1 else 'runs'}: {parts}."

    def _name_best(self) -> str:
        """Say which setting has the highest mean on the longest rows, and which it surely beats."""
        known = [s for s in self.settings if s.seeds]
        longest = max((s.factors.get(LENGTH) or 0 for s in known), default=0)
        rivals = [s for s in known if (s.factors.get(LENGTH) or 0) == longest]
        means = [s.mean for s in rivals]
        if len(rivals) < 2 or min(means) == max(means):
            return ""
        best = max(rivals, key=lambda s: s.mean)
        below = sum(s.interval[1] < best.interval[0] for s in rivals)
        return (
            f"The highest mean accuracy is {percent(best.mean)} ({best.name()}); its interval lies "
            f"above those of {below} of {len(rivals) - 1} other settings. "
        )


def collect_results(table: pl.DataFrame, factors: Sequence[str]) -> SweepResults:
    """Return what a sweep's table shows.

    Args:
        factors: the columns that tell runs from one another.
    """
    runs = table.unique(factors, keep="first", maintain_order=True)
    findings, missing = {}, {}
    for name, measure in FIGURES.items():
        try:
            findings[name] = tuple(measure(table))
        except NotApplicableError as error:
            missing[name] = str(error)
    errors: dict[str, tuple[str, ...]] = {}
    for row in runs.filter(pl.col("error").is_not_null()).iter_rows(named=True):
        name = ", ".join(f"{factor}={row[factor]}" for factor in factors)
        error = f"{row['status']}: {row['error']}"
        errors[error] = (*errors.get(error, ()), name)
    return SweepResults(
        settings=tuple(collect_settings(table)),
        findings=findings,
        missing=missing,
        counts=dict(Counter(runs["status"])),
        errors=errors,
    )
