"""What a diagnosis starts from: a failed run, and what its model answers; what one look gives."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lab.intervals import Z95, clustered_wilson
from lab.lengthening import Stage, list_stages
from lab.models.evaluation import score
from lab.ops.cross_entropy import linear_argmax
from lab.suite.audit import audit
from lab.training.loop import TrainingState, count_validation_rows
from lab.training.records import Metrics, RowLine
from lab.training.run import Run
from tasks.base import IGNORE, count_rows

ROWS, RULE_ROWS = 128, 256
FEWEST_ROWS = 30
"""Minimum number of rows to report a mean of: its interval assumes a normal distribution."""
TOKENS = 2**17
"""Maximum number of tokens of these rows, unless an evaluation has more."""
WITHOUT_RECALL = frozenset(
    ("chance", "bigram", "context value", "last token", "last value", "majority", "position only")
)
"""Shortcuts, by the names that tasks give them, that do not look up what belongs to a query."""
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
    def rows(self) -> Sequence[RowLine]:
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


@dataclass(frozen=True)
class Answers:
    """What the last model answers on validation rows of the last stage.

    Attributes:
        rows: how many were answered, those of the last evaluation at least.
        accuracy: share of scored positions answered right.
        interval: 95 %, over rows.
        outranks: how often the right answer has a larger logit than another answer of the row; ties
            count half, so guessing gives .5. None if rows have one answer each.
        outranks_interval: 95 %, over rows.
        rule: the best of the rules that need no recall.
        plateau: its accuracy.
    """

    rows: int
    accuracy: float
    interval: tuple[float, float]
    outranks: float | None
    outranks_interval: tuple[float, float] | None
    rule: str
    plateau: float


def collect_answers(failed: FailedRun) -> Answers:
    """Answer validation rows of the last stage with the last model."""
    stage, seed, model = failed.stage, failed.run.train.seed, failed.state.model
    device = next(model.parameters()).device
    rows = max(
        count_validation_rows(stage, failed.run.train),  # so that its accuracy is this one
        count_rows(TOKENS, stage.task.seq_len, most=ROWS),
    )
    training, right, count, shares = model.training, [], [], []
    model.eval()
    with torch.no_grad():
        for start in range(0, rows, stage.batch_size):
            size = min(stage.batch_size, rows - start)
            batch = stage.task.batch(
                split="validation", start=start, size=size, seed=seed, device=device
            )
            hidden, head, _ = score(model, batch, "fp32")
            answers = linear_argmax(hidden, head)
            asked = batch.targets != IGNORE
            targets = batch.find_nearest(batch.targets.masked_scatter(asked, answers))[asked]
            hits, scored = answers == targets, asked.sum(1).tolist()
            parts = [part.split(scored) for part in (hidden, targets, hits)]
            for some, wanted, hit in zip(*parts, strict=True):
                right.append(int(hit.sum()))
                count.append(len(hit))
                share = _measure_outranking(some, head, wanted)
                if share is not None:
                    shares.append(share)
    model.train(training)
    rules = audit(stage.task, split="validation", seed=seed, rows=RULE_ROWS).scores
    best = max((rule for rule in rules if rule.name in WITHOUT_RECALL), key=lambda r: r.accuracy)
    outranks, interval = _average(shares)
    return Answers(
        rows=rows,
        accuracy=sum(right) / sum(count),
        interval=clustered_wilson(torch.tensor(right), torch.tensor(count)),
        outranks=outranks,
        outranks_interval=interval,
        rule=best.name,
        plateau=best.accuracy,
    )


def _measure_outranking(hidden: Tensor, head: Tensor, targets: Tensor) -> float | None:
    """Return how often a row's right answer has a larger logit than another answer of the row."""
    logits = hidden @ head[targets].T
    other = targets[:, None] != targets
    if not bool(other.any()):
        return None
    right = logits.diagonal()[:, None]
    above = (right > logits).double() + 0.5 * (right == logits).double()
    return above[other].mean().item()


def _average(shares: list[float]) -> tuple[float | None, tuple[float, float] | None]:
    """Return the mean over rows and its 95 % interval."""
    if len(shares) < FEWEST_ROWS:
        return None, None
    mean = statistics.fmean(shares)
    half = Z95 * statistics.stdev(shares) / math.sqrt(len(shares))
    return mean, (max(0.0, mean - half), min(1.0, mean + half))
