"""What accuracy on a task is to be read beside: chance, each shortcut, and the oracle."""

from dataclasses import dataclass

import torch

from lab.intervals import clustered_wilson
from tasks.base import IGNORE, Predictor, Task, count_rows

ROWS = 1024
"""Rows that rules are scored on, unless the rows are very long."""
TOKENS = 2**23
"""Tokens of them, at most, but for the fewest rows."""
FEWEST_ROWS = 16
TOKENS_AT_ONCE = 2**19


@dataclass(frozen=True)
class Score:
    """How a rule does on a task.

    Attributes:
        name: "chance", a shortcut's, or "oracle".
        accuracy: share of scored positions answered right, in [0, 1].
        interval: 95 %, of the accuracy over other rows; None for chance, which is computed, or of
            a mixture estimated, apart from the rows.
    """

    name: str
    accuracy: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Audit:
    """The rules of a task on the first rows of a split.

    Attributes:
        scores: chance, each shortcut, the oracle.
        rows: how many were looked at.
        scored: positions of them that count.
        sound: whether the oracle is always right or, where rows do not settle their targets, more
            often than every shortcut.
    """

    scores: tuple[Score, ...]
    rows: int
    scored: int
    sound: bool

    @property
    def best_first(self) -> list[Score]:
        """The scores by accuracy."""
        return sorted(self.scores, key=lambda score: -score.accuracy)


def audit(task: Task, *, split: str = "test", seed: int = 0, rows: int = ROWS) -> Audit:
    """Score chance, each shortcut and the oracle on the first rows of a split.

    Args:
        task: whose rules.
        split: of the rows.
        seed: of the rows.
        rows: how many, unless they are very long.
    """
    rows = count_rows(TOKENS, task.seq_len, fewest=FEWEST_ROWS, most=rows)
    at_once = count_rows(TOKENS_AT_ONCE, task.seq_len)
    rules: dict[str, Predictor] = {**task.shortcuts(), "oracle": task.oracle}
    right = {name: [] for name in rules}
    count = []
    for start in range(0, rows, at_once):
        size = min(at_once, rows - start)
        batch = task.batch(split=split, start=start, size=size, seed=seed)
        asked = batch.targets != IGNORE
        count.append(asked.sum(1))
        for name, rule in rules.items():
            right[name].append((asked & (rule(batch) == batch.targets)).sum(1))
    scored = torch.cat(count)
    number = int(scored.sum())
    scores = [Score("chance", task.chance, None)]
    for name, found in right.items():
        hits = torch.cat(found)
        scores.append(Score(name, int(hits.sum()) / number, clustered_wilson(hits, scored)))
    *others, oracle = [score.accuracy for score in scores]
    sound = oracle > max(others) if task.stochastic else oracle == 1
    return Audit(tuple(scores), rows, number, sound)
