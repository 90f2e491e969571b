"""What a run's evaluations found at values of one option, beside what it was trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from analysis.run.baselines import scored_positions
from lab.intervals import wilson
from lab.training.generalisation import as_given
from lab.training.runs import Run
from tasks.base import Schedule


@dataclass(frozen=True)
class Reach:
    """Accuracy at values of an option.

    Attributes:
        option: of the task.
        values: as text, those of numbers in order.
        places: the same as numbers; None where some is none.
        trained: the least and the greatest number that was trained on; None where it is no number.
        trained_as: what was trained on, as text.
        accuracy: share of right answers at each value, in [0, 1].
        interval: 95 %, low and high.
        chance: accuracy of a uniform guess.
        rows: test rows at each value.
        reference: accuracy in training's own setting; None where the run has none.
        reference_interval: its 95 % interval.
        reference_chance: accuracy of a uniform guess there.
        step: after which all was measured.
        failed: values that the model could not take, and why.
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
    reference_chance: float
    step: int
    failed: tuple[tuple[str, str], ...]


def reach(run: Run, option: str, entries: Sequence[dict[str, Any]]) -> Reach:
    """Return what a run's evaluations at values of one option found."""
    trained = run.task.options().get(option)
    least_most = _range(trained)
    numbers = all(_is_number(entry["value"]) for entry in entries)
    if numbers:
        entries = sorted(entries, key=lambda entry: entry["value"])
    met = [entry for entry in entries if "error" not in entry]
    step = entries[0]["step"]
    reference = next((e for e in met if as_given(e["value"]) == trained), None)
    if reference is not None:
        right, ends = reference["accuracy"], tuple(reference["interval"])
    else:
        right, ends = _of_the_run(run, step)
    return Reach(
        option=option,
        values=tuple(_text(entry["value"]) for entry in met),
        places=tuple(float(entry["value"]) for entry in met) if numbers else None,
        trained=least_most if numbers else None,
        trained_as=_text(trained),
        accuracy=np.array([entry["accuracy"] for entry in met], np.float64),
        interval=np.array([entry["interval"] for entry in met], np.float64).reshape(-1, 2),
        chance=np.array([entry["chance"] for entry in met], np.float64),
        rows=tuple(entry["rows"] for entry in met),
        reference=right,
        reference_interval=ends,
        reference_chance=run.task.chance,
        step=step,
        failed=tuple((_text(e["value"]), e["error"]) for e in entries if "error" in e),
    )


def _of_the_run(run: Run, step: int) -> tuple[float | None, tuple[float, float] | None]:
    """Return the accuracy that training ended with, if it is of the weights after this step."""
    result = run.result() or {}
    right = result.get("accuracy")
    if right is None or result["steps"] != step:
        return None, None
    return right, wilson(right, scored_positions(run))


def _range(trained: Any) -> tuple[float, float] | None:
    """Return the least and greatest of the numbers that were trained on."""
    values = trained.values if isinstance(trained, Schedule) else trained
    several = values if isinstance(values, tuple) else (values,)
    if not all(map(_is_number, several)):
        return None
    return float(min(several)), float(max(several))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """Return a value of an option as a reader expects it."""
    if isinstance(value, Schedule):
        return f"{_text(value.first)} → {_text(value.last)} over {value.rows:,} rows"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if value is None:
        return "the default"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
