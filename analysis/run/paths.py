"""A run's way through training: its quantities by step, when each changes, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from analysis.base import NotApplicableError, Subject
from analysis.run.trajectories import Series, chosen_steps, few_rows, follow
from analysis.statistics.change_points import (
    FEWEST,
    Change,
    estimate_noise_bound,
    find_change_point,
    moves,
)
from lab.training.runs import Run


@dataclass(frozen=True)
class Path:
    """A quantity's way through training, layer by layer.

    Attributes:
        series: one a layer; one in all for the model's loss and accuracy.
        changes: when each changes; None where it does not, or when cannot be said.
        leading: which one changes most; where none does, which one moves most.
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
        """Whether that one moves at all, be it at no one time."""
        return moves(self.lead.levels)


@dataclass(frozen=True)
class Paths:
    """All quantities that apply to a run.

    Attributes:
        steps: whose weights were looked at, ascending from 0.
        rows: of the test split, the same at every step.
        paths: one a quantity.
    """

    steps: Int[np.ndarray, " n"]
    rows: int
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Onset:
    """When a quantity changes in a run.

    Attributes:
        quantity: its name.
        layer: the block where it changes most; None for the model as a whole.
        change: None where it does not change, or when cannot be said.
        moved: whether its values lie a tenth apart, which tells these two cases apart.
    """

    quantity: str
    layer: int | None
    change: Change | None
    moved: bool


@dataclass(frozen=True)
class Onsets:
    """When the quantities change.

    Attributes:
        runs: what each run is called; a single one needs no name.
        onsets: of each run, one for each quantity that applies to it.
        last_step: the last that was looked at in any run.
    """

    runs: tuple[str, ...]
    onsets: tuple[tuple[Onset, ...], ...]
    last_step: int


def measure(subject: Subject) -> list[Paths | Onsets]:
    """Return the quantities by step, and the order in which they change.

    Raises:
        NotApplicableError: without a run, or with too few kept steps.
        RunError: when kept weights cannot be read.
    """
    paths = trace(subject)
    return [paths, Onsets(("",), (onsets_of(paths),), int(paths.steps[-1]))]


def across(subjects: Sequence[Subject | Run]) -> Onsets:
    """Return when the quantities change in several runs, of different seeds say.

    `describe` and `draw` take it, too. Runs are called by their seeds where these differ, else by
    their folders.

    Raises:
        ValueError: for no run.
        NotApplicableError: when one has too few kept steps.
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
        onsets=tuple(map(onsets_of, traced)),
        last_step=max(int(paths.steps[-1]) for paths in traced),
    )


def trace(subject: Subject) -> Paths:
    """Return the quantities of a run by step, with their changes.

    Raises:
        NotApplicableError: without a run, or with too few kept steps.
        RunError: when kept weights cannot be read.
    """
    if subject.run is None:
        raise NotApplicableError("no run, so no weights of earlier steps")
    steps = chosen_steps(subject.run)
    if len(steps) < FEWEST:
        count = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
        raise NotApplicableError(f"weights of {count} are kept, fewer than {FEWEST}")
    batch = few_rows(subject)
    bound = estimate_noise_bound(steps, np.random.default_rng(subject.seed))
    return paths_of(follow(subject, batch, steps), steps, len(batch.inputs), bound)


def paths_of(
    followed: Sequence[Series], steps: Int[np.ndarray, " n"], rows: int, bound: float
) -> Paths:
    """Return series by quantity, with their changes; see `find_change_point` for the bound."""
    paths = []
    for quantity in dict.fromkeys(series.quantity for series in followed):
        series = tuple(one for one in followed if one.quantity == quantity)
        changes = tuple(
            find_change_point(steps, one.levels, bound, one.resampled) for one in series
        )
        paths.append(Path(series, changes, _leading(series, changes)))
    return Paths(steps, rows, tuple(paths))


def _leading(series: Sequence[Series], changes: Sequence[Change | None]) -> int:
    """Return which series has the largest change, or without any the widest range."""
    if any(changes):
        return int(np.argmax([0.0 if change is None else change.size for change in changes]))
    return int(np.argmax([np.ptp(one.levels) for one in series]))


def changes(runs: Sequence[Sequence[Onset]]) -> list[dict[str, Change]]:
    """Return each run's changes by quantity."""
    return [{onset.quantity: onset.change for onset in run if onset.change} for run in runs]


def in_order(runs: Sequence[Sequence[Onset]]) -> list[str]:
    """Return the quantities that change in some run, by the median of their steps."""
    steps: dict[str, list[float]] = {}
    for run in changes(runs):
        for name, change in run.items():
            steps.setdefault(name, []).append(change.step)
    return sorted(steps, key=lambda name: float(np.median(steps[name])))


def onsets_of(paths: Paths) -> tuple[Onset, ...]:
    """Return when each quantity changes in the layer where it does most."""
    return tuple(
        Onset(path.lead.quantity, path.lead.layer, path.change, path.moved) for path in paths.paths
    )
