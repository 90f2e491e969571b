"""How far does it reach? Accuracy at settings that the model was not trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Curves, Dots, Line, Pairs, curves, pairs
from analysis.figures.theme import MUTED
from analysis.plain import figure_only
from analysis.run.baselines import find_rival, read_interval
from analysis.words import RIGHT, join_names, percent, percents
from lab.training.evaluation import undo_json
from lab.training.run import Run
from tasks.base import Schedule

__all__ = ["TITLE", "AccuracyByOption", "measure"]

TITLE = "How far does it reach?"
HOLDS = "holds"
WIDE = 4
"""The axis is logarithmic if the largest value is this many times the smallest."""


@dataclass(frozen=True)
class AccuracyByOption(Finding):
    """Accuracy at several values of one option of the task.

    Attributes:
        values: as text; numbers are in ascending order.
        places: the values as numbers; None if any is not a number.
        trained: the least and the greatest number that was trained on; None if it is not a number.
        reference: accuracy in the setting of training; None where the run has none.
        rival: the best of chance and the shortcuts in the setting of training, and its accuracy.
        failed: values that the model cannot process, and why.
    """

    option: str
    values: tuple[str, ...]
    places: tuple[float, ...] | None
    trained: tuple[float, float] | None
    trained_as: str
    accuracy: Float[np.ndarray, " n"]
    interval: Float[np.ndarray, "n 2"]
    chance: Float[np.ndarray, " n"]
    reference: float | None
    reference_interval: tuple[float, float] | None
    rival: tuple[str, float]
    step: int
    failed: tuple[tuple[str, str], ...]
    title: str = ""
    measure: str = figure_only(default="accuracy")

    reading = (
        "Means over test rows with 95 % intervals; the grey line is a uniform guess, the dotted "
        "one the accuracy in the setting of training, and the grey area or upright line marks "
        "what was trained on. “Holds”: the interval lies above a guess, and reaches that of "
        "training or lies above it. “Half”: the accuracy is at least half-way from a guess to that "
        "of training."
    )

    @property
    def comparable(self) -> bool:
        """Whether the model has learned something, surely, that could hold elsewhere."""
        return self.reference_interval is not None and self.reference_interval[0] > self.rival[1]

    @property
    def verdicts(self) -> list[str]:
        """What becomes of the accuracy of training at each value."""
        if self.reference is None or self.reference_interval is None or not self.comparable:
            return [""] * len(self.values)
        holds = self.interval[:, 1] >= self.reference_interval[0]
        above = self.interval[:, 0] > self.chance
        half = self.accuracy >= (self.reference + self.chance) / 2
        falls = np.where(above, np.where(half, "half", "falls"), "not surely above a guess")
        return np.where(holds, np.where(above, HOLDS, "too wide to say"), falls).tolist()

    @property
    def says(self) -> str:
        """At which values the accuracy of training holds."""
        if not self.comparable:
            return (
                f"With {self.option} at {self.trained_as}, as in training, the model is not surely "
                f"better than {self.rival[0]} ({percent(self.rival[1])}), so there is nothing "
                "that could hold elsewhere."
            )
        others = [i for i in range(len(self.values)) if not self._was_trained(i)]
        holds = [self.values[i] for i in others if self.verdicts[i] == HOLDS]
        return (
            f"With {self.option} at {self.trained_as}, as in training, "
            f"{percent(self.reference or 0.0)} {RIGHT[self.measure]}; other values at which "
            f"this holds, of {len(others)} tried: {join_names(holds or ['none'])}."
        )

    def numbers(self) -> Table:
        """Return the accuracy at each value, and what the model cannot process."""
        rows = []
        if self.reference is not None and self.reference_interval is not None:
            verdict = "above" if self.comparable else "not surely above"
            verdict += f" {self.rival[0]} ({percent(self.rival[1])})"
            ends = " to ".join(percents(*self.reference_interval))
            rows.append((f"{self.trained_as} (training)", percent(self.reference), ends, verdict))
        for i, verdict in enumerate(self.verdicts):
            ends = " to ".join(percents(*self.interval[i].tolist()))
            if self.values[i] != self.trained_as:
                rows.append((self.values[i], percent(float(self.accuracy[i])), ends, verdict))
        rows += [(value, "", "", why) for value, why in self.failed]
        columns = (
            self.option,
            f"{self.measure} after step {self.step:,}",
            "95 % interval",
            "verdict",
        )
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure | None:
        """Draw a dot with a whisker for each value, and mark what was trained on."""
        levels = {} if self.reference is None else {"as trained": self.reference}
        y = Axis(self.measure, "share")
        if not self.values:
            return None
        if self.places is None:
            guess = Dots("a guess", self.chance, look="chance")
            dots = Dots(self.measure, self.accuracy, self.interval), guess
            return pairs(self.values, Pairs(dots, y, levels=levels), title=self.option)
        x = np.array(self.places)
        lines = [
            Line(self.measure, x, self.accuracy, self.interval, look=0),
            Line("a guess", x, self.chance, look=-1),
        ]
        fig = curves([Curves(lines, y, levels=levels)], self._scale(self.places))
        if self.trained is not None:
            look = {"fillcolor": MUTED, "opacity": 0.4, "line": {"color": MUTED, "width": 3}}
            fig.add_vrect(*self.trained, layer="below", **look)
        return fig

    def _was_trained(self, i: int) -> bool:
        """Whether a value was trained on, or lies between two that were."""
        if self.places is None or self.trained is None:
            return self.values[i] == self.trained_as
        return self.trained[0] <= self.places[i] <= self.trained[1]

    def _scale(self, places: Sequence[float]) -> Axis:
        """Return the axis of values, with what was trained on; logarithmic where they are wide."""
        low, high = min(*places, *(self.trained or places)), max(*places, *(self.trained or places))
        wide = low > 0 and high >= WIDE * low
        edge = 0.05 * (high - low) or 1.0
        ends = (low / 1.2, high * 1.2) if wide else (low - edge, high + edge)
        ticks = dict(zip(places, self.values, strict=True))
        return Axis(self.option, scale="log" if wide else "linear", ends=ends, ticks=ticks)


def measure(subject: Subject) -> list[AccuracyByOption]:
    """Read the accuracy at other values of each option that was tried.

    Raises:
        NotApplicableError: for a model that no run trained, or that was not evaluated elsewhere.
    """
    run = subject.run
    if run is None:
        raise NotApplicableError("no run to read evaluations of")
    entries = (run.read_result() or {}).get("evaluations", [])
    if not entries:
        raise NotApplicableError("the run was evaluated in no setting but its own")
    return [
        collect_evaluations(run, option, [entry for entry in entries if entry["option"] == option])
        for option in dict.fromkeys(entry["option"] for entry in entries)
    ]


def collect_evaluations(
    run: Run, option: str, entries: Sequence[dict[str, Any]]
) -> AccuracyByOption:
    """Collect a run's evaluations at values of one option."""
    trained = run.task.options.get(option)
    numbers = all(_is_number(entry["value"]) for entry in entries)
    if numbers:
        entries = sorted(entries, key=lambda entry: entry["value"])
    done = [entry for entry in entries if "error" not in entry]
    step = entries[0]["step"]
    reference = next((entry for entry in done if undo_json(entry["value"]) == trained), None)
    if reference is not None:
        right, ends = reference["accuracy"], tuple(reference["interval"])
    else:
        right, ends = _read_result(run, step)
    return AccuracyByOption(
        option=option,
        values=tuple(_format_value(entry["value"]) for entry in done),
        places=tuple(float(entry["value"]) for entry in done) if numbers else None,
        trained=_find_range(trained) if numbers else None,
        trained_as=_format_value(trained),
        accuracy=np.array([entry["accuracy"] for entry in done], np.float64),
        interval=np.array([entry["interval"] for entry in done], np.float64).reshape(-1, 2),
        chance=np.array([entry["chance"] for entry in done], np.float64),
        reference=right,
        reference_interval=ends,
        rival=find_rival(run),
        step=step,
        failed=tuple((_format_value(e["value"]), e["error"]) for e in entries if "error" in e),
        title=f"{run.task.measure.capitalize()} by {option}, trained at {_format_value(trained)}",
        measure=run.task.measure,
    )


def _read_result(run: Run, step: int) -> tuple[float | None, tuple[float, float] | None]:
    """Return the accuracy of the run's result, if it is of the weights after this step."""
    result = run.read_result() or {}
    right = result.get("accuracy")
    if right is None or result["steps"] != step:
        return None, None
    return right, read_interval(run)


def _find_range(trained: Any) -> tuple[float, float] | None:
    """Return the least and the greatest of the numbers that were trained on."""
    values = trained.values if isinstance(trained, Schedule) else trained
    several = values if isinstance(values, tuple) else (values,)
    if not all(map(_is_number, several)):
        return None
    return float(min(several)), float(max(several))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format_value(value: Any) -> str:
    """Return a value of an option as text."""
    if isinstance(value, Schedule):
        first, last = _format_value(value.first), _format_value(value.last)
        return f"{first} → {last} over {value.rows:,} rows"
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value))
    if value is None:
        return "the default"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
