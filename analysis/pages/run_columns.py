"""What a comparison says of each run: its result, size, speed, stages, and what sets it apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from analysis import mechanism
from analysis.base import NotApplicableError, Subject
from analysis.mechanism import Mechanism
from analysis.plain import figure_only
from analysis.run import baselines
from analysis.run.curves import read_evaluations
from lab.training.catalog import name_choices
from lab.training.records import find_ending, name_ending
from lab.training.run import Run


@dataclass(frozen=True)
class RunColumn:
    """One run of a comparison.

    Attributes:
        name: its folder's name, with as many parent folders as it takes to tell runs apart.
        model: its stack, or the user's mixer.
        differs: the fields of its configuration that differ from the first run's by choice.
        stopped: how it ended, a key of `find_ending`.
        accuracy: on the test split, in [0, 1]; None without a result.
        interval: its 95 % interval over other rows.
        loss: nats.
        steps: training steps.
        seconds: of training.
        rows_per_second: of training.
        parameters: of the model.
        mechanism: how it recalls, in a few words; None where that does not apply.
        test_rows: how many test rows `accuracy` is of.
        held_out_steps: steps at which validation rows of the length trained at were evaluated.
        held_out: accuracy at these steps.
        held_out_rows: on how many rows each was evaluated.
        stages: row lengths trained at, each with its number of steps.
        full_from: steps before rows had the task's own length; None if they never had it.
        tested_at: the step of the weights that `accuracy` is of; None without one.
    """

    name: str
    model: str
    differs: dict[str, Any]
    stopped: str
    accuracy: float | None
    interval: tuple[float, float] | None
    loss: float | None
    steps: int
    seconds: float | None
    rows_per_second: float | None
    parameters: int
    mechanism: str | None
    test_rows: int
    held_out_steps: Int[np.ndarray, " m"] = figure_only()
    held_out: Float[np.ndarray, " m"] = figure_only()
    held_out_rows: Int[np.ndarray, " m"] = figure_only()
    stages: tuple[tuple[int, int], ...] = ()
    full_from: int | None = 0
    tested_at: int | None = None

    @property
    def ending(self) -> str:
        """How the run ended, in words."""
        return name_ending(self.stopped)


def summarize_run(subject: Subject, name: str, first: Run) -> RunColumn:
    """Return what a comparison says of a subject's run; `first` is the run it is compared with.

    Raises:
        RunError: when the run's records cannot be read.
    """
    run = subject.run
    assert run is not None
    result, metrics = run.read_result() or {}, run.read_metrics()
    evaluated, stages, full = read_evaluations(run), metrics.stages, run.task.seq_len
    accuracy = result.get("accuracy")
    try:
        found = mechanism.measure(subject)
    except NotApplicableError:
        found = []
    labels = [result.label for result in found if isinstance(result, Mechanism)]
    return RunColumn(
        name=name,
        model=run.model.model or run.model.stack,
        differs=_find_differences(run, first),
        stopped=find_ending(result),
        accuracy=accuracy,
        interval=baselines.read_interval(run),
        loss=result.get("loss"),
        steps=result.get("steps", int(evaluated.steps[-1]) if len(evaluated.steps) else 0),
        seconds=result.get("seconds"),
        rows_per_second=result.get("rows_per_second"),
        parameters=subject.model.parameter_count(),
        mechanism=labels[0] if labels else None,
        test_rows=run.train.test_rows,
        held_out_steps=evaluated.steps,
        held_out=evaluated.accuracy,
        held_out_rows=evaluated.rows,
        stages=tuple((stage.seq_len, stage.steps) for stage in stages),
        full_from=next((stage.began for stage in stages if stage.seq_len == full), None),
        tested_at=baselines.find_tested_step(run),
    )


def name_apart(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    raise AssertionError("whole paths tell paths apart")


def _find_differences(run: Run, first: Run) -> dict[str, Any]:
    """Return the fields of a configuration that differ from the first run's by choice."""
    ours, theirs, chosen = run.to_dict(), first.to_dict(), name_choices([run, first])
    return {
        name: value
        for part in ("task", "model", "train")
        for name, value in ours[part].items()
        if name in chosen and theirs[part].get(name) != value
    }
