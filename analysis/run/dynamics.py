"""What changed when? Quantities over training, when each changes, and in which order."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Int

from analysis.base import Finding, NotApplicableError, Subject, Table, check_tokens
from analysis.figures import Axis, Curves, Dots, Line, Pairs, curves, pairs
from analysis.figures.theme import VERMILLION
from analysis.run.curves import LEAST_LOSS
from analysis.run.trajectories import LOSS, Series, choose_steps, follow, take_few_rows
from analysis.statistics.change_points import (
    FALSE_ALARMS,
    FEWEST,
    Change,
    estimate_noise_bound,
    find_change_point,
    moves,
)
from analysis.words import join_names, name_head, percent
from lab.training.run import Run

__all__ = ["TITLE", "compare_runs", "measure"]

TITLE = "Training dynamics"
FIRST = 0.5
"""Where step 0 stands on a logarithmic axis."""
PANEL = 76
"""Height of a panel, px."""
CRITERION = (
    "A quantity moves if it changes by 0.1 or more, as a share of 1 or in nats. The move has a "
    "definite time if the levels before and after it are further apart than in all but "
    f"{100 * FALSE_ALARMS:.0f} % of random walks, and of series of white noise."
)
"""What counts as a change, for the reader."""


@dataclass(frozen=True)
class QuantityPath:
    """A quantity by training step, layer by layer.

    Attributes:
        series: one for each layer; a single one for the model's loss and accuracy.
        changes: when each changes; None where it does not, or at no definite time.
        leading: index of the series that changes most; if none does, of the one that moves most.
    """

    series: tuple[Series, ...]
    changes: tuple[Change | None, ...]
    leading: int

    @property
    def lead(self) -> Series:
        """The series that changes most."""
        return self.series[self.leading]

    @property
    def change(self) -> Change | None:
        """When that one changes."""
        return self.changes[self.leading]

    @property
    def moved(self) -> bool:
        """Whether that one moves, if only gradually."""
        return moves(self.lead.levels)

    @property
    def dated(self) -> str:
        """Name of what is searched for a change."""
        return self.lead.dated or self.lead.quantity

    @property
    def when(self) -> str:
        """When what is searched for a change makes one."""
        if self.change is not None:
            return f"{self.dated}: {_format_bracket(self.change)}"
        moves = "moves, at no definite time" if self.moved else "changes by less than a tenth"
        return f"{self.dated} {moves}"

    def draw_panel(self, steps: Int[np.ndarray, " n"]) -> Curves:
        """Return a panel with a line for each layer, and the change of the leading one."""
        lead = self.lead
        place = "" if lead.layer is None else f", layer {lead.layer}"
        if lead.layer is not None and lead.head is not None:
            place = f", {name_head(lead.layer, lead.head)}"
        others = [series for i, series in enumerate(self.series) if i != self.leading]
        lines = [Line("other layers", steps, one.values, look=-1) for one in others]
        lines.append(Line("layer that changes most", steps, lead.values, look=0))
        if self.change is not None:
            at, along = np.log2(1 + self.change.step), np.log2(1.0 + steps)
            height = np.interp([at], along, lead.values)
            change = np.array([self.change.step])
            lines.append(Line("when it changes", change, height, shape="points", look=1))
        unit = "" if lead.unit == "share" else f", {lead.axis}"
        title = f"{lead.quantity}{unit}{place}"
        levels = {} if lead.null is None else {"without learning": lead.null}
        return Curves(lines, self._scale(), title, levels, height=PANEL)

    def _scale(self) -> Axis:
        """Return the axis: shares from 0 to 1, the loss by decades, the rest from 0."""
        if self.lead.unit == "share":
            return Axis(unit="share", ticks={0: "0 %", 0.5: "50 %", 1: "100 %"})
        values = np.concatenate([series.values for series in self.series])
        most = float(values.max()) or 1.0
        if self.lead.quantity == LOSS.name:
            return Axis(scale="log", ends=(max(values.min(), LEAST_LOSS) / 1.3, 1.3 * most))
        return Axis(ends=(-0.05 * most, 1.1 * most))


@dataclass(frozen=True)
class Paths(Finding):
    """All quantities that apply to a run, by training step.

    Attributes:
        rows: of the test split, the same at every step.
    """

    steps: Int[np.ndarray, " n"]
    rows: int
    paths: tuple[QuantityPath, ...]

    title = "Quantities by training step"
    reading = (
        "Each point is the weights of a kept step, all measured on the same test rows. The mark "
        "shows when the layer that changes most does so, the band between which steps: at the "
        "split into two levels with the least squared error over log(1 + step). Dotted: what "
        "chance, a uniform guess or a uniform row gives. Masses are shares of a row's magnitudes: "
        "of a value's row on its key, of a query's on its value, and of any on the token before, "
        "the previous-token score. The change of the loss is that of "
        f"e^−loss, the geometric mean of the right answers' probabilities. {CRITERION}"
    )

    @property
    def says(self) -> str:
        """Which quantities change."""
        names = [path.dated for path in self.paths if path.change is not None]
        named = f" ({join_names(names)})" if names else ""
        return (
            f"Quantities with one clear change by step {self.steps[-1]:,}, measured on {self.rows} "
            f"of the test rows: {len(names) or 'none'} of {len(self.paths)}{named}."
        )

    def numbers(self) -> Table:
        """Return from where to where each quantity goes, and what it is without learning."""
        rows = []
        for path in self.paths:
            one = path.lead
            name = one.quantity if one.layer is None else f"{one.quantity}, layer {one.layer}"
            ends = [_format(one, one.values[i]) for i in (0, -1)]
            null = "" if one.null is None else f"{_format(one, one.null)} ({one.null_name})"
            rows.append((name, *ends, null, path.when))
        columns = ("quantity", "at step 0", f"at step {self.steps[-1]:,}", "without learning")
        return Table((*columns, "one clear change"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a panel for each quantity over one axis of steps."""
        x = Axis("training step", scale="steps")
        fig = curves([path.draw_panel(self.steps) for path in self.paths], x)
        for row, path in enumerate(self.paths, 1):
            if path.change is not None:
                low, high = x.place(np.array([path.change.low, path.change.high]))
                place: Any = {"row": row, "col": 1}
                look: Any = {"fillcolor": VERMILLION, "opacity": 0.25, "line_width": 0}
                fig.add_vrect(low, high, layer="below", **look, **place)
        return fig


@dataclass(frozen=True)
class Onset:
    """When a quantity changes in a run.

    Attributes:
        layer: the block where it changes most; None for the model as a whole.
        change: None where it changes by less than a tenth, or at no definite time.
    """

    quantity: str
    layer: int | None
    change: Change | None


@dataclass(frozen=True)
class Onsets(Finding):
    """When the quantities change.

    Attributes:
        runs: the name of each run; a single one needs none.
        onsets: for each run, one onset for each quantity that applies to it.
        last_step: the last step that was measured in any run.
    """

    runs: tuple[str, ...]
    onsets: tuple[tuple[Onset, ...], ...]
    last_step: int

    title = "In which order things change"
    reading = (
        "The dot is half-way from one level to the other. The whisker spans the kept steps "
        "between which that point lies, also on resampled rows (95 %). Where whiskers overlap, "
        "the order is open: such quantities are joined by “and”. By chance, two changes "
        "come in the same order in all of n runs once in 2^(n − 1) times. The order belongs to "
        "what is named: e^−loss is the geometric mean of the right answers' probabilities, and "
        f"the loss in nats is half-way at another step. {CRITERION}"
    )

    @property
    def changes(self) -> list[dict[str, Change]]:
        """Each run's changes by quantity."""
        return [{o.quantity: o.change for o in run if o.change} for run in self.onsets]

    @property
    def order(self) -> list[str]:
        """The quantities that change in any run, by the median of their steps."""
        names = dict.fromkeys(name for run in self.changes for name in run)
        return sorted(names, key=self._find_middle)

    @property
    def says(self) -> str:
        """In which order the quantities change, or how often the order of two agrees."""
        runs = len(self.runs)
        if runs == 1:
            return f"Changes in order: {self._list_in_order() or 'none at a definite time'}."
        couples = list(itertools.permutations(self.order, 2))
        agree = sum(self._count_before(*couple)[0] == runs for couple in couples)
        return (
            f"Pairs of changes that come in the same order in all {runs} runs: {agree} of "
            f"{len(couples) // 2}."
        )

    def numbers(self) -> Table | None:
        """Return when each quantity changes, and before which others it certainly does."""
        rows = []
        for name in self.order:
            found = [run[name] for run in self.changes if name in run]
            begins = min(change.begins for change in found)
            ends = max(change.ends or self.last_step for change in found)
            counts = {other: self._count_before(name, other) for other in self.order}
            before = [f"{other} in {n} of {of}" for other, (n, of) in counts.items() if n]
            span = f"steps {begins:,} to {ends:,}"
            row = self._label(name), f"step {self._find_middle(name):,.0f}", span
            rows.append((*row, ", ".join(before)))
        columns = ("quantity", "half-way", "from a tenth to nine tenths", "before, in runs")
        return Table(columns, tuple(rows)) if rows else None

    def figure(self) -> go.Figure | None:
        """Draw a line for each quantity, the earliest on top; None where nothing changes."""
        names, series = self.order, []
        if not names:
            return None
        for run, changes in zip(self.runs, self.changes, strict=True):
            found = [changes.get(name) for name in names]
            spans = [(c.step, c.low, c.high) if c else (np.nan,) * 3 for c in found]
            steps = np.maximum(np.array(spans, float), FIRST)
            notes = [
                f"{name}: {_format_bracket(c)}" if c else ""
                for name, c in zip(names, found, strict=True)
            ]
            series.append(Dots(run, steps[:, 0], steps[:, 1:], notes=notes))
        first = np.nanmin([dots.ends for dots in series])
        axis = Axis("training step", "count", "log", ends=(first / 1.2, 1.1 * self.last_step))
        return pairs([self._label(name) for name in names], Pairs(series, axis))

    def _find_middle(self, name: str) -> float:
        """Return the median over runs of the step at which a quantity is half-way."""
        return float(np.median([run[name].step for run in self.changes if name in run]))

    def _count_before(self, first: str, second: str) -> tuple[int, int]:
        """Count the runs in which a change certainly precedes another, and those with both."""
        both = [run for run in self.changes if first in run and second in run]
        return sum(run[first].precedes(run[second]) for run in both), len(both)

    def _list_in_order(self) -> str:
        """List the changes of the first run in order; undecided ones stand together."""
        [changes, *_] = self.changes
        groups: list[dict[str, Change]] = []
        for name, change in sorted(changes.items(), key=lambda one: (one[1].step, one[1].high)):
            if not groups or all(earlier.precedes(change) for earlier in groups[-1].values()):
                groups.append({})
            groups[-1][name] = change
        return ", then ".join(
            f"{join_names([*group])} (steps {min(c.low for c in group.values()):,} to "
            f"{max(c.high for c in group.values()):,})"
            for group in groups
        )

    def _label(self, name: str) -> str:
        """Return the name of a quantity, with its layer if all runs agree on it."""
        layers = {o.layer for run in self.onsets for o in run if o.quantity == name and o.change}
        [layer] = layers if len(layers) == 1 else [None]
        return name if layer is None else f"{name}, layer {layer}"


def measure(subject: Subject) -> list[Paths | Onsets]:
    """Follow the quantities by step, and find the order in which they change.

    Raises:
        NotApplicableError: without a run, with too few kept steps, or where rows are vectors.
        RunError: when kept weights cannot be read.
    """
    paths = trace(subject)
    return [paths, Onsets(("",), (find_onsets(paths),), int(paths.steps[-1]))]


def compare_runs(subjects: Sequence[Subject | Run]) -> Onsets:
    """Return when the quantities change in several runs, for example of different seeds.

    Runs are named by their seeds if these differ, otherwise by their folders.

    Raises:
        ValueError: for no run.
        NotApplicableError: when a run has too few kept steps.
        RunError: when kept weights cannot be read.
    """
    if not subjects:
        raise ValueError("subjects=[]: must be at least one run")
    given = [Subject.of(one) if isinstance(one, Run) else one for one in subjects]
    traced = [trace(subject) for subject in given]
    runs = [subject.run for subject in given if subject.run]
    seeds = [f"seed {run.train.seed}" for run in runs]
    folders = [run.path.name for run in runs]
    return Onsets(
        runs=tuple(seeds if len(set(seeds)) == len(seeds) else folders),
        onsets=tuple(map(find_onsets, traced)),
        last_step=max(int(paths.steps[-1]) for paths in traced),
    )


def trace(subject: Subject) -> Paths:
    """Follow the quantities of a run by step, and date their changes.

    Raises:
        NotApplicableError: without a run, or with too few kept steps.
        RunError: when kept weights cannot be read.
    """
    check_tokens(subject)
    if subject.run is None:
        raise NotApplicableError("no run, so no weights of earlier steps")
    steps = choose_steps(subject.run)
    if len(steps) < FEWEST:
        count = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
        raise NotApplicableError(f"weights of {count} are kept, fewer than {FEWEST}")
    batch = take_few_rows(subject)
    bound = estimate_noise_bound(steps, np.random.default_rng(subject.seed))
    return date_changes(follow(subject, batch, steps), steps, len(batch.inputs), bound)


def date_changes(
    followed: Sequence[Series], steps: Int[np.ndarray, " n"], rows: int, bound: float
) -> Paths:
    """Group series by quantity and date their changes; see `find_change_point` for the bound."""
    paths = []
    for quantity in dict.fromkeys(series.quantity for series in followed):
        series = tuple(one for one in followed if one.quantity == quantity)
        changes = tuple(
            find_change_point(steps, one.levels, bound, one.resampled) for one in series
        )
        # The series with the largest change leads; without changes, that with the widest range.
        sizes = [change.size if change else 0.0 for change in changes]
        ranges = [float(np.ptp(one.levels)) for one in series]
        leading = int(np.argmax(sizes if any(changes) else ranges))
        paths.append(QuantityPath(series, changes, leading))
    return Paths(steps, rows, tuple(paths))


def find_onsets(paths: Paths) -> tuple[Onset, ...]:
    """Return when each quantity changes, in the layer where it changes most."""
    return tuple(Onset(path.dated, path.lead.layer, path.change) for path in paths.paths)


def _format_bracket(change: Change) -> str:
    """Return between which steps a change lies, as text."""
    return f"steps {change.low:,} to {change.high:,}"


def _format(series: Series, value: float) -> str:
    if series.unit == "share":
        return percent(float(value))
    return f"{value:.3g} nats" if series.unit == "nats" else f"{value:.1f}"
