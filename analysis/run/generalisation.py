"""How far does it reach? Accuracy at settings that the model was not trained on."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from analysis.base import Finding, NotApplicableError, Subject, Words, describe, draw
from analysis.plots import style
from analysis.run.baselines import find_rival, read_interval
from analysis.words import format_counts, percent
from lab.training.evaluation import undo_json
from lab.training.run import Run
from tasks.base import Schedule

__all__ = ["TITLE", "AccuracyByOption", "describe", "draw", "measure"]

TITLE = "How far does it reach?"
WIDE = 4
"""The axis is logarithmic if the largest value is this many times the smallest."""
RANGE = "rgba(128, 134, 145, 0.2)"
"""`style.MUTED`, transparent."""


@dataclass(frozen=True)
class AccuracyByOption(Finding):
    """Accuracy at several values of one option of the task.

    Attributes:
        option: its name.
        values: as text; numbers are in ascending order.
        places: the values as numbers; None if any is not a number.
        trained: the least and the greatest number that was trained on; None if it is not a number.
        trained_as: what was trained on, as text.
        accuracy: share of right answers at each value, in [0, 1].
        interval: 95 %, low and high.
        chance: accuracy of a uniform guess.
        rows: test rows at each value.
        reference: accuracy in the setting of training; None where the run has none.
        reference_interval: its 95 % interval.
        rival: the best of chance and the shortcuts in the setting of training, and its accuracy.
        step: training steps behind the weights.
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
    rows: tuple[int, ...]
    reference: float | None
    reference_interval: tuple[float, float] | None
    rival: tuple[str, float]
    step: int
    failed: tuple[tuple[str, str], ...]

    def describe(self) -> Words:
        """Say how far the accuracy holds, and where it falls to."""
        title = f"Accuracy by {self.option}, trained at {self.trained_as}"
        says = self._summarize()
        for value, why in self.failed:
            says += f" Not at {value}: {why.rstrip('.')}."
        reading = ""
        if self.values:
            reading = (
                f"Dots are means over {format_counts(self.rows)} test rows for each value; "
                "whiskers are 95 % intervals over rows, the dotted line is a uniform guess. "
            )
        reading += f"Weights after step {self.step:,}."
        if self.trained is not None:
            shape = "range" if self.trained[0] < self.trained[1] else "line"
            reading += f" The grey {shape} is what was trained on."
        if self.reference is not None:
            reading += " “Holds”: the interval reaches that of training or lies above it."
        shown = ", ".join(self._quote(i) for i in range(len(self.values)))
        return Words(title, says, reading, f"Accuracy by {self.option}: {shown}. {says}")

    def _quote(self, i: int) -> str:
        """Return an accuracy and its value as text."""
        return f"{percent(float(self.accuracy[i]))} at {self.values[i]}"

    def _summarize(self) -> str:
        """Compare the accuracy at each value with that in the setting of training."""
        if not self.values:
            return "No value could be evaluated."
        if self.reference is None or self.reference_interval is None:
            return f"{self._describe_extremes()}; the run has no accuracy to compare with."
        opening = (
            f"With {self.option} at {self.trained_as}, as in training, "
            f"{percent(self.reference)} of the answers are right"
        )
        low, high = self.reference_interval
        if self.trained is None or self.places is None:
            return f"{opening}; {self._compare_each(low, high)}."
        name, best = self.rival
        if low <= best:
            return (
                f"{opening}. That is not certainly more than {name} ({percent(best)}), which needs "
                "no training: the model has learned nothing that could hold elsewhere."
            )
        above = [i for i, place in enumerate(self.places) if place > self.trained[1]]
        below = [i for i, place in enumerate(self.places) if place < self.trained[0]]
        parts = []
        if above:
            parts.append(self._describe_side(above, "above"))
        if below:
            parts.append(self._describe_side(below[::-1], "below"))
        return f"{opening}; {'; '.join(parts) or 'no other value was tried'}."

    def _describe_side(self, order: Sequence[int], side: str) -> str:
        """Say how far the accuracy holds, and stays over half-way to a guess, on one side.

        Args:
            order: indices of the values, from the nearest to what was trained on to the farthest.
            side: "above" or "below" what was trained on.
        """
        assert self.reference is not None
        assert self.reference_interval is not None
        holds = _count_leading(
            [bool(self.interval[i, 1] >= self.reference_interval[0]) for i in order]
        )
        middle = (self.reference + self.chance) / 2
        half = _count_leading([bool(self.accuracy[i] >= middle[i]) for i in order])
        far, way = order[-1], "down" if side == "below" else "up"
        end = self._quote(far)
        if self.interval[far, 0] <= self.chance[far]:
            end += ", not certainly more than a guess"
        if holds == len(order):
            # An interval that reaches a guess too is too wide to show that anything holds.
            wide = any(self.interval[i, 0] <= self.chance[i] for i in order)
            verb = "no fall is certain" if wide else "it holds"
            return f"{side} that {verb} as far as was tried, {end}"
        if holds:
            last = order[holds - 1]
            value = percent(float(self.accuracy[last]))
            text = f"{side} that it holds {way} to {self.values[last]} ({value})"
        else:
            first = end if far == order[0] else self._quote(order[0])
            text = f"{side} that it falls at once, to {first}"
        if half > max(holds, 1):
            limit = self.values[order[half - 1]]
            text += f", keeps half of its lead over a guess {way} to {limit}"
        return text if far == order[0] else f"{text}, and is {end}"

    def _compare_each(self, low: float, high: float) -> str:
        """Say which values, in no order, certainly differ from the setting of training."""
        parts = []
        for i, (lower, upper) in enumerate(self.interval):
            differs = upper < low or lower > high
            parts.append(self._quote(i) + ("" if differs else ", no certain difference"))
        return "; ".join(parts)

    def _describe_extremes(self) -> str:
        best, worst = int(self.accuracy.argmax()), int(self.accuracy.argmin())
        if best == worst:
            return f"The accuracy is {self._quote(best)}"
        return f"The accuracy is between {self._quote(worst)} and {self._quote(best)}"

    def draw(self) -> go.Figure | None:
        """Draw a dot with a whisker for each value, and mark what was trained on."""
        if not self.values:
            return None
        fig = style.new_figure(height=360)
        x: Sequence[float] | Sequence[str] = self.places or self.values
        if self.places is not None and self.trained is not None:
            _mark_trained(fig, self.trained)
        fig.add_scatter(
            x=x,
            y=self.chance,
            mode="lines" if len(x) > 1 else "markers",
            line={"color": style.MUTED, "width": 1.4, "dash": "dot"},
            marker={"color": style.MUTED, "symbol": "line-ew-open", "size": 14},
            name="chance",
            hovertemplate="chance: %{y:.2%}<extra></extra>",
        )
        places = [*(self.places or ()), *(self.trained or ())]
        if self.reference is not None:
            known = self.trained is not None and self.places is not None
            along = [min(places), max(places)] if known else x
            fig.add_scatter(
                x=along,
                y=[self.reference] * len(along),
                mode="lines",
                line={"color": style.GREEN, "width": 1.6, "dash": "dash"},
                name="as trained",
                hovertemplate="as trained: %{y:.2%}<extra></extra>",
            )
        fig.add_scatter(
            x=x,
            y=self.accuracy,
            mode="lines+markers" if self.places is not None else "markers",
            line={"width": 2, "color": style.BLUE},
            marker={"size": 8},
            error_y=style.make_whiskers(self.accuracy, self.interval),
            cliponaxis=False,
            name="accuracy",
            customdata=[html.escape(value) for value in self.values],
            hovertemplate="%{customdata}: %{y:.2%}<extra></extra>",
        )
        fig.update_yaxes(range=[-0.02, 1.05], tickformat=".0%", title_text="accuracy")
        fig.update_xaxes(title_text=html.escape(self.option), showgrid=False)
        if self.places is None:
            fig.update_xaxes(type="category")
        else:
            wide = min(places) > 0 and max(places) >= WIDE * min(places)
            fig.update_xaxes(
                type="log" if wide else "linear",
                tickvals=self.places,
                ticktext=[html.escape(value) for value in self.values],
            )
        return fig.update_layout(margin={"t": 84})


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
        rows=tuple(entry["rows"] for entry in done),
        reference=right,
        reference_interval=ends,
        rival=find_rival(run),
        step=step,
        failed=tuple((_format_value(e["value"]), e["error"]) for e in entries if "error" in e),
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


def _count_leading(flags: Sequence[bool]) -> int:
    """Count the flags that are true before the first that is false."""
    return flags.index(False) if False in flags else len(flags)


def _mark_trained(fig: go.Figure, trained: tuple[float, float]) -> None:
    """Mark what was trained on by a grey line, or a grey range."""
    low, high = trained
    fig.add_scatter(
        x=[low, low, high, high],
        y=[-0.02, 1.05, 1.05, -0.02],
        mode="lines",
        fill="toself",
        fillcolor=RANGE,
        line={"color": style.MUTED, "width": 3 if low == high else 0},
        opacity=0.5,
        name="trained on",
        hoverinfo="skip",
    )
