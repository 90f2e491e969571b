"""Rules that look right without solving a task: what accuracy is to be read beside."""

from functools import lru_cache

import torch
from torch import Tensor

from tasks.base import IGNORE, Batch, Predictor, Task

TABLE_ROWS = 2048
"""Training rows that a table of what is most frequent is counted on."""


def what_followed(inputs: Tensor, *, latest: bool) -> Tensor:
    """Return the token after the first or latest earlier occurrence of each token (else -100)."""
    answers = []
    for row in inputs.tolist():
        seen: dict[int, int] = {}
        answer = []
        for position, token in enumerate(row):
            answer.append(row[seen[token] + 1] if token in seen else IGNORE)
            if latest or token not in seen:
                seen[token] = position
        answers.append(answer)
    return torch.tensor(answers, device=inputs.device)


def most_recent_match(batch: Batch) -> Tensor:
    """Copy what followed the token before, int64 [b t] (else -100)."""
    return what_followed(batch.inputs, latest=True)


def bigram(task: Task) -> Predictor:
    """Return the rule that answers what is most often right after the token at hand."""
    return lambda batch: _looked_up(*_table(task, by_position=False), batch.inputs)


def position_only(task: Task) -> Predictor:
    """Return the rule that answers what is most often right at the position."""

    def rule(batch: Batch) -> Tensor:
        t = batch.inputs.shape[1]
        positions = torch.arange(t, device=batch.inputs.device).expand_as(batch.inputs)
        return _looked_up(*_table(task, by_position=True), positions)

    return rule


@lru_cache(maxsize=64)
def _table(task: Task, *, by_position: bool) -> tuple[Tensor, Tensor]:
    """Return features in order, and the target most frequent with each in the first rows."""
    rows = max(1, min(TABLE_ROWS, 2**20 // task.seq_len))
    batch = task.batch(size=rows)
    row, position = (batch.targets != IGNORE).nonzero(as_tuple=True)
    target = batch.targets[row, position]
    feature = position if by_position else batch.inputs[row, position]
    pairs, counts = torch.stack([feature, target], 1).unique(dim=0, return_counts=True)
    # Of equal counts the lowest target: pairs come in order, and the sort is stable.
    pairs = pairs[counts.argsort(descending=True, stable=True)]
    pairs = pairs[pairs[:, 0].argsort(stable=True)]
    first = torch.ones(len(pairs), dtype=torch.bool)
    first[1:] = pairs[1:, 0] != pairs[:-1, 0]
    return pairs[first, 0], pairs[first, 1]


def _looked_up(features: Tensor, answers: Tensor, wanted: Tensor) -> Tensor:
    features, answers = features.to(wanted.device), answers.to(wanted.device)
    place = torch.searchsorted(features, wanted.contiguous()).clamp(max=len(features) - 1)
    return torch.where(features[place] == wanted, answers[place], IGNORE)
