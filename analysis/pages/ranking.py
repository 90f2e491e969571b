"""Rank settings: only on one task and over several seeds, and only as far as tests tell."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.plots.style import BLUE, MUTED, new_figure
from analysis.statistics.comparisons import (
    compute_least_p,
    estimate_median,
    holm,
    log_rank_p,
    permutation_p,
)
from analysis.words import count_decimals, join_names, percent
from lab.sweeps.table import count_training_rows, find_solving_steps
from lab.training.catalog import name_choices
from lab.training.run import Run

LEVEL = 0.05
"""Corrected p below which two settings differ."""
RING = 15
"""Size of a run's mark, pixels: it surrounds a diamond at the same place."""
ROW = 30
"""Height of a setting's line, pixels."""
Measure = Literal["steps", "rows", "accuracy"]


@dataclass(frozen=True)
class Contender:
    """A setting of all options but the seed, and how its runs did.

    Attributes:
        name: what sets it apart from the others, e.g. "stack=SM".
        values: of each seed's run: steps or rows until it was solved or ended, or its accuracy.
        solved: whether it was solved by then; otherwise its steps or rows are censored.
        middle: Kaplan–Meier median, infinite if fewer than half were solved; or mean accuracy.
    """

    name: str
    values: tuple[float, ...]
    solved: tuple[bool, ...]
    middle: float


@dataclass(frozen=True)
class Ranking(Finding):
    """Settings, best first, and which differ.

    Attributes:
        measure: what they are ranked by: "steps" or "rows" until solved, or "accuracy".
        contenders: those with several seeds, best first.
        better: pairs of names, the better one first, that differ significantly.
        alone: settings with one seed, which have no rank.
        blind: whether no pair could differ significantly, whatever the runs had done.
        refusal: why there is no ranking; empty where there is one.
    """

    measure: Measure
    contenders: tuple[Contender, ...]
    better: tuple[tuple[str, str], ...]
    alone: tuple[str, ...]
    blind: bool
    refusal: str

    def describe(self) -> Words:
        """Say which settings are better than which, or why there is no ranking."""
        title = {
            "steps": "Steps until solved",
            "rows": "Training rows until solved",
            "accuracy": "Test accuracy at equal budget",
        }[self.measure]
        if self.refusal:
            says = f"{self.refusal}: no ranking."
            return Words("Ranking", says, "", says)
        known = {contender.name: contender for contender in self.contenders}
        parts = []
        for name in known:
            worse = [self._quote(known[loser]) for winner, loser in self.better if winner == name]
            verb = "is more often right" if self.measure == "accuracy" else "is solved sooner"
            if worse:
                parts.append(f"{self._quote(known[name])} {verb} than {join_names(worse)}")
        if parts:
            says = f"{'; '.join(parts)}."
        else:
            says = "No difference between settings is significant: "
            says += f"{join_names([self._quote(contender) for contender in self.contenders])}."
        if self.blind:
            says += " With so few seeds no difference could be: train more seeds."
        if self.alone:
            says += f" One seed, so no rank: {join_names(list(self.alone))}."
        reading = (
            "A ring is a run, one for each seed; the diamond is their mean. Two settings differ if "
            "an exact permutation test says so"
        )
        if self.measure != "accuracy":
            reading = (
                "A ring is a run, one for each seed; a triangle is a run that was not solved by "
                "then. The diamond is the Kaplan–Meier median, missing where fewer than half were "
                "solved. Two settings differ if an exact log-rank test says so"
            )
        reading += f", p < {LEVEL} after Holm's correction for all pairs."
        return Words(title, says, reading, f"Rings for {title.lower()}, a line per setting. {says}")

    def _quote(self, contender: Contender) -> str:
        if self.measure == "accuracy":
            decimals = count_decimals([known.middle for known in self.contenders])
            return f"{contender.name} ({percent(contender.middle, decimals)})"
        if math.isinf(contender.middle):
            return f"{contender.name} (fewer than half of its runs solved)"
        return f"{contender.name} (median {contender.middle:,.0f} {self.measure})"

    def draw(self) -> go.Figure | None:
        """Draw each run and each setting's middle, best on top; None without a ranking."""
        if self.refusal:
            return None
        names = [html.escape(contender.name) for contender in self.contenders]
        fig = new_figure(height=150 + ROW * len(names))
        shown = ".2%" if self.measure == "accuracy" else ","
        for solved, symbol, name in (
            (True, "circle-open", "a run"),
            (False, "triangle-right-open", "a run, not solved by then"),
        ):
            points = [
                (value, label)
                for contender, label in zip(self.contenders, names, strict=True)
                for value, ended in zip(contender.values, contender.solved, strict=True)
                if ended is solved
            ]
            if points:
                fig.add_scatter(
                    x=[value for value, _ in points],
                    y=[label for _, label in points],
                    mode="markers",
                    marker={"symbol": symbol, "color": MUTED, "size": RING},
                    name=name,
                    hovertemplate=f"%{{y}}: %{{x:{shown}}} ({name})<extra></extra>",
                )
        middle = "mean" if self.measure == "accuracy" else "median"
        known = [
            (contender.middle, label)
            for contender, label in zip(self.contenders, names, strict=True)
            if math.isfinite(contender.middle)
        ]
        fig.add_scatter(
            x=[value for value, _ in known],
            y=[label for _, label in known],
            mode="markers",
            marker={"symbol": "diamond", "color": BLUE, "size": 10},
            name=middle,
            hovertemplate=f"%{{y}}: {middle} %{{x:{shown}}}<extra></extra>",
        )
        unit = "test accuracy" if self.measure == "accuracy" else f"{self.measure} until solved"
        fig.update_xaxes(title_text=unit, tickformat=".1%" if shown == ".2%" else ",")
        fig.update_yaxes(
            categoryorder="array", categoryarray=names[::-1], automargin="left", showgrid=False
        )
        return fig.update_layout(margin_t=90)


def rank(runs: Sequence[Run]) -> Ranking:
    """Rank the settings of runs: by steps or rows to solve, or by accuracy at equal budget.

    Raises:
        RunError: when a run's records cannot be read.
    """
    settings = group_settings(runs)
    several = {name: group for name, group in settings.items() if len(group) > 1}
    alone = tuple(name for name in settings if name not in several)

    def refuse(why: str) -> Ranking:
        return Ranking("steps", (), (), alone, False, why)

    if any(run.task != runs[0].task for run in runs):
        return refuse("The runs have different tasks, or different options of a task")
    if len(settings) < 2:
        alike = len({run.train.seed for run in runs}) == 1
        what = "have the same settings and seed" if alike else "differ in nothing but the seed"
        return refuse(f"The runs {what}")
    if not several:
        return refuse("One seed")
    if len(several) < 2:
        return refuse(f"One seed for all but {next(iter(several))}")
    measure = _choose_measure([run for group in several.values() for run in group])
    if measure is None:
        return refuse("The runs are neither solved at the same accuracy nor of the same budget")
    contenders = [_collect(name, group, measure) for name, group in several.items()]
    sign = -1 if measure == "accuracy" else 1
    contenders.sort(key=lambda of: (sign * of.middle, sign * sum(of.values) / len(of.values)))
    pairs = list(combinations(contenders, 2))
    corrected = holm([_compare(one, other, measure) for one, other in pairs])
    least = min(compute_least_p(len(one.values), len(other.values)) for one, other in pairs)
    return Ranking(
        measure=measure,
        contenders=tuple(contenders),
        better=tuple(
            (one.name, other.name)
            for (one, other), p in zip(pairs, corrected, strict=True)
            if p < LEVEL
        ),
        alone=alone,
        blind=least * len(pairs) >= LEVEL,
        refusal="",
    )


def group_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by all options but the seed, named by what sets them apart; one run per seed."""
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        key = json.dumps(_list_options(run), sort_keys=True)
        groups.setdefault(key, {}).setdefault(run.train.seed, run)
    options = [_list_options(next(iter(group.values()))) for group in groups.values()]
    every = {name.partition(".")[2] for found in options for name in found}
    names = _name_apart(options, name_choices(runs))
    if len({*names}) < len(names):  # made by versions of the lab with other defaults
        names = _name_apart(options, every)
    return {name: list(group.values()) for name, group in zip(names, groups.values(), strict=True)}


def _name_apart(options: Sequence[dict[str, Any]], among: set[str]) -> list[str]:
    """Name each configuration by those of some options in which it differs from another."""
    every = dict.fromkeys(name for found in options for name in found)
    apart = [
        name
        for name in every
        if name.partition(".")[2] in among
        and any(found.get(name) != options[0].get(name) for found in options)
    ]
    return [
        ", ".join(f"{name.partition('.')[2]}={_format(found.get(name))}" for name in apart)
        or "all runs"
        for found in options
    ]


def _list_options(run: Run) -> dict[str, Any]:
    content = json.loads(json.dumps(run.to_dict()))
    parts = {part: content[part] for part in ("task", "model", "train")}
    return {
        f"{part}.{name}": value
        for part, options in parts.items()
        for name, value in options.items()
        if (part, name) != ("train", "seed")
    }


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={part}" for name, part in value.items()) or "none"
    return str(value)


def _choose_measure(runs: Sequence[Run]) -> Measure | None:
    """Choose the measure that runs can be ranked by; None if there is none.

    Time to solve needs a common threshold, and a run that reached it. Accuracy needs runs that
    took all of the same number of steps on as many rows.
    """
    sizes = {run.train.batch_size for run in runs}
    if len({run.train.solved_at for run in runs}) == 1 and any(_find_time(run)[1] for run in runs):
        return "steps" if len(sizes) == 1 else "rows"
    results = [run.read_result() or {} for run in runs]
    budgets = {(result.get("steps"), result.get("rows")) for result in results}
    ended = all(result.get("stopped") == "budget" for result in results)
    return "accuracy" if ended and len(budgets) == 1 else None


def _find_time(run: Run) -> tuple[int, bool]:
    """Return the steps until validation rows of full length were solved, or all; and whether."""
    metrics = run.read_metrics()
    solved = find_solving_steps(run, metrics).get(run.task.seq_len)
    return (metrics[-1]["step"] if metrics else 0) if solved is None else solved, solved is not None


def _collect(name: str, runs: Sequence[Run], measure: Measure) -> Contender:
    if measure == "accuracy":
        values = tuple(float((run.read_result() or {})["accuracy"]) for run in runs)
        return Contender(name, values, (True,) * len(values), sum(values) / len(values))
    times, solved = zip(*(_find_time(run) for run in runs), strict=True)
    if measure == "rows":
        times = tuple(
            count_training_rows(run, [row for row in run.read_metrics() if row["step"] <= step])
            for run, step in zip(runs, times, strict=True)
        )
    return Contender(name, times, solved, estimate_median(times, solved)[0])


def _compare(one: Contender, other: Contender, measure: Measure) -> float:
    """Return the two-sided p value of the hypothesis that two settings do not differ."""
    if measure == "accuracy":
        return permutation_p(one.values, other.values)
    return log_rank_p(one.values, one.solved, other.values, other.solved)
