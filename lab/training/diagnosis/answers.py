"""What the last model answers on held-out rows, compared with rules that need no recall."""

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.intervals import Z95, clustered_wilson
from lab.models.evaluation import score
from lab.ops.cross_entropy import linear_argmax
from lab.suite.audit import audit
from lab.training.diagnosis.failed_run import FailedRun
from lab.training.validation import count_validation_rows
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
            hidden, head, targets = score(model, batch, "fp32")
            hits = linear_argmax(hidden, head) == targets
            scored = (batch.targets != IGNORE).sum(1).tolist()
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
