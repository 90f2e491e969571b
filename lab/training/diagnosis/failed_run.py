"""What a diagnosis starts from, what one look at it gives, and the diagnosis itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from lab.lengthening import Stage, list_stages
from lab.training.metrics import Metrics, MetricsRow
from lab.training.runs import Run
from lab.training.state import TrainingState

Kind = Literal[
    "cannot",
    "position forbids",
    "outside the learning-rate window",
    "under way",
    "not begun",
    "undecided",
]


@dataclass(frozen=True)
class Diagnosis:
    """Why a run ended without solving its task.

    Attributes:
        kind: the first in the order above for which there is evidence.
        because: its numbers in words.
        evidence: those numbers by name, ready for JSON.
        seq_len: tokens of the rows in the stage that the run ended in, which it is about.
    """

    kind: Kind
    because: str
    evidence: dict[str, Any]
    seq_len: int


@dataclass(frozen=True)
class Look:
    """What looking for one kind of failure found.

    Attributes:
        claims: whether the evidence speaks for this kind.
        says: its numbers in words, without a full stop at the end, beginning in lower case.
        evidence: those numbers by name.
    """

    claims: bool
    says: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FailedRun:
    """A run that ended unsolved.

    Attributes:
        run: the run, whose metrics are complete.
        state: its last; no look changes it.
        by_hand: verdict and reason of the construction; None for a task that has none.
        stopped: why training ended, as in result.json.
    """

    run: Run
    state: TrainingState
    by_hand: Mapping[str, Any] | None
    stopped: str

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of the run, read once: it has ended, so they no longer grow."""
        return self.run.read_metrics()

    @property
    def stage(self) -> Stage:
        """The stage of training that the run ended in."""
        return list_stages(self.run.task, self.run.train)[self.state.stage]

    @property
    def full_length(self) -> bool:
        """Whether rows had reached the task's own length."""
        return self.stage.task.seq_len == self.run.task.seq_len

    @property
    def goal(self) -> float:
        """The accuracy that would have ended the stage."""
        return self.run.train.solved_at if self.full_length else self.run.train.lengthen_at

    @property
    def rows(self) -> Sequence[MetricsRow]:
        """The metrics of the stage, oldest first."""
        return [row for row in self.metrics if row["step"] > self.state.stage_step]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The evaluations of the stage: its training rows until then, and the accuracy."""
        began, size = self.state.stage_step, self.stage.batch_size
        return [
            ((found["step"] - began) * size, found["accuracy"])
            for found in self.metrics.evaluations
            if found["step"] > began
        ]
