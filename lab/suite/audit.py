"""Baselines for a model's accuracy: chance, each shortcut, and the oracle."""

from collections.abc import Iterator
from dataclasses import dataclass

from lab.intervals import RowAmounts, RowCounts
from tasks.base import Batch, Predictor, Task, count_right, count_rows

ROWS = 1024
"""Rows that predictors are scored on, unless the rows are very long."""
TOKENS = 2**23
"""Tokens of those rows at most, unless `FEWEST_ROWS` have more."""
FEWEST_ROWS = 16
TOKENS_AT_ONCE = 2**19


@dataclass(frozen=True)
class Score:
    """The accuracy of a predictor on a task.

    Attributes:
        name: "chance", the name of a shortcut, or "oracle".
        accuracy: share of scored positions answered right, or explained variance, in [0, 1].
        interval: 95 % interval of the accuracy over other rows; None for chance, which is not
            measured on these rows.
    """

    name: str
    accuracy: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Audit:
    """The predictors of a task on the first rows of a split.

    Attributes:
        scores: chance, each shortcut, the oracle.
        rows: number of rows.
        scored: number of their scored positions.
        sound: whether the oracle is always right or, where rows do not determine their targets,
            right more often than every shortcut.
    """

    scores: tuple[Score, ...]
    rows: int
    scored: int
    sound: bool

    @property
    def best_first(self) -> list[Score]:
        """The scores, highest accuracy first."""
        return sorted(self.scores, key=lambda score: -score.accuracy)


def list_predictors(task: Task) -> dict[str, Predictor]:
    """Return the shortcuts of a task and its oracle, by name."""
    return {**task.shortcuts(), "oracle": task.oracle}


def count_audited(task: Task, rows: int = ROWS) -> int:
    """Return how many rows `audit` scores predictors on if it is asked for some."""
    return count_rows(TOKENS, task.seq_len, fewest=FEWEST_ROWS, most=rows)


def audit(task: Task, *, split: str = "test", seed: int = 0, rows: int = ROWS) -> Audit:
    """Score chance, each shortcut and the oracle on the first rows of a split.

    Args:
        task: the task.
        split: the split of the rows.
        seed: the seed of the rows.
        rows: number of rows, unless they are very long.
    """
    rows = count_audited(task, rows)
    predictors = list_predictors(task)
    right = {name: RowAmounts() if task.vectors else RowCounts() for name in predictors}
    number = 0
    for batch in _draw_batches(task, split, seed, rows):
        number += int(batch.scored.sum())
        asked = task.count_asked(batch)
        for name, predict in predictors.items():
            answers = predict(batch)
            right[name].add(count_right(answers, batch.find_nearest(answers)), asked)
    scores = [Score("chance", task.chance, None)]
    scores += [Score(name, of.share, of.find_interval()) for name, of in right.items()]
    *others, oracle = [score.accuracy for score in scores]
    sound = oracle > max(others) if task.stochastic else oracle == 1
    return Audit(tuple(scores), rows, number, sound)


def measure_bits(
    task: Task, *, split: str = "test", seed: int = 0, rows: int = ROWS
) -> dict[str, float]:
    """Return the bits a token that each predictor with probabilities takes on the same rows."""
    totals, number = dict.fromkeys(task.surprisals(), 0.0), 0
    if not totals:
        return totals
    for batch in _draw_batches(task, split, seed, count_audited(task, rows)):
        number += int(batch.scored.sum())
        for name, find_bits in task.surprisals().items():
            totals[name] += float(find_bits(batch)[batch.scored].sum())
    return {name: total / number for name, total in totals.items()}


def _draw_batches(task: Task, split: str, seed: int, rows: int) -> Iterator[Batch]:
    """Yield the first rows of a split, as many at once as memory has room for."""
    at_once = count_rows(TOKENS_AT_ONCE, task.seq_len)
    for start in range(0, rows, at_once):
        yield task.batch(split=split, start=start, size=min(at_once, rows - start), seed=seed)
