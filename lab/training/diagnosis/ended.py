"""What a diagnosis starts from, what one look at it gives, and the diagnosis itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lab.lengthening import Stage, stages
from lab.training.fit import State
from lab.training.runs import Run

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
        kind: the first in the order above that the evidence speaks for.
        because: one sentence with its numbers.
        evidence: those numbers by name, ready for JSON.
        seq_len: tokens of the rows that it is about, those of the stage the run ended in.
    """

    kind: Kind
    because: str
    evidence: dict[str, Any]
    seq_len: int


@dataclass(frozen=True)
class Look:
    """What looking for one kind of failure found.

    Attributes:
        claims: whether the evidence speaks for the kind.
        says: one sentence with its numbers, without a full stop, beginning in lower case.
        evidence: those numbers by name.
    """

    claims: bool
    says: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """A run that ended unsolved.

    Attributes:
        run: the run, whose metrics are complete.
        state: its last; no look changes it.
        by_hand: what `experiment` says of weights set by hand; None where no way is built.
        stopped: "budget" or "diverged".
    """

    run: Run
    state: State
    by_hand: Mapping[str, Any] | None
    stopped: str

    @property
    def stage(self) -> Stage:
        """The part of training that the run ended in."""
        return stages(self.run.task, self.run.train)[self.state.stage]

    @property
    def full_length(self) -> bool:
        """Whether rows had reached the task's own length."""
        return self.stage.task.seq_len == self.run.task.seq_len

    @property
    def goal(self) -> float:
        """The accuracy that would have ended the stage."""
        return self.run.train.solved_at if self.full_length else self.run.train.lengthen_at

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the stage, oldest first."""
        return [row for row in self.run.metrics() if row["step"] > self.state.stage_step]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The evaluations of the stage: training rows of it seen by then, and accuracy."""
        began, size = self.state.stage_step, self.stage.batch_size
        return [
            ((found["step"] - began) * size, found["accuracy"])
            for found in self.run.evaluations()
            if found["step"] > began
        ]
