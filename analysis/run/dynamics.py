"""What changed when? Quantities over training, when each changes, and in which order."""

from collections.abc import Sequence

from analysis.base import Subject, describe, draw
from analysis.run.onsets import Onsets, find_onsets
from analysis.run.paths import Paths, trace
from lab.training.run import Run

__all__ = ["TITLE", "compare_runs", "describe", "draw", "measure"]

TITLE = "Training dynamics"


def measure(subject: Subject) -> list[Paths | Onsets]:
    """Follow the quantities by step, and find the order in which they change.

    Raises:
        NotApplicableError: without a run, or with too few kept steps.
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
