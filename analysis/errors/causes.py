"""Causes of errors that can be read off the row: where the wrong answer occurs in it.

Axis letter of this file, besides the package's: w wrong answer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from analysis.links import find_pairs, has_pairs
from tasks.base import IGNORE, Batch

DECOY, MASKED, DECAYED, OTHER_PAIR, IN_ROW, OUTRANKED, UNKNOWN = (
    "a decoy's follower",
    "masked away",
    "decayed below its rival",
    "another pair's value",
    "another token of the row",
    "right value outranked",
    "unknown",
)
CAUSES = (DECOY, MASKED, DECAYED, OTHER_PAIR, IN_ROW, OUTRANKED, UNKNOWN)
"""In order of precedence: an error is attributed to the first cause that applies."""
BLOCK_ENTRIES = 2**20
"""Maximum number of tokens that are compared with answers at once."""


@dataclass(frozen=True)
class Questions:
    """Scored positions, and where the row stores what they ask for.

    Attributes:
        rows: row of the batch.
        positions: in the row.
        targets: the right answers.
        pairs: index of the pair among the row's links; −1 where the task names none.
        keys: position of the stored key; −1 likewise.
        values: position of the stored value; −1 likewise.
    """

    rows: Int[np.ndarray, " w"]
    positions: Int[np.ndarray, " w"]
    targets: Int[np.ndarray, " w"]
    pairs: Int[np.ndarray, " w"]
    keys: Int[np.ndarray, " w"]
    values: Int[np.ndarray, " w"]

    def __getitem__(self, chosen: np.ndarray | slice) -> "Questions":
        """Select some of the questions."""
        return Questions(*(part[chosen] for part in vars(self).values()))

    def __len__(self) -> int:
        return len(self.rows)

    def iterate_blocks(self, width: int) -> Iterator[slice]:
        """Yield slices so short that `width` entries a question fit into memory."""
        size = max(1, BLOCK_ENTRIES // max(1, width))
        yield from (slice(i, i + size) for i in range(0, len(self), size))


def find_questions(batch: Batch) -> Questions:
    """Return the scored positions of a batch, row by row."""
    rows, positions = (batch.targets != IGNORE).cpu().numpy().nonzero()
    targets = batch.targets.cpu().numpy()[rows, positions]
    none = np.full(len(rows), -1)
    if not has_pairs(batch):
        return Questions(rows, positions, targets, none, none, none)
    query, key, value = (link.cpu().numpy() for link in find_pairs(batch))
    pair_at = np.full(batch.targets.shape, -1)
    row, pair = (query >= 0).nonzero()
    pair_at[row, query[row, pair]] = pair
    pairs = pair_at[rows, positions]
    found = pairs >= 0
    return Questions(
        rows,
        positions,
        targets,
        pairs,
        np.where(found, key[rows, pairs], -1),
        np.where(found, value[rows, pairs], -1),
    )


def detect_decoys(
    inputs: Int[np.ndarray, "b t"], questions: Questions, answers: Int[np.ndarray, " w"]
) -> Bool[np.ndarray, " w"]:
    """Return whether each answer follows a decoy: an earlier token that equals the queried key.

    The stored key itself is not a decoy. Where the task stores no pairs, there are no decoys.
    """
    found = np.zeros(len(questions), bool)
    place = np.arange(inputs.shape[1] - 1)
    for part in questions.iterate_blocks(inputs.shape[1]):
        some, row = questions[part], inputs[questions.rows[part]]
        key = row[np.arange(len(some)), some.positions]
        decoy = (row[:, :-1] == key[:, None]) & (place < some.positions[:, None])
        decoy &= (place != some.keys[:, None]) & (some.pairs >= 0)[:, None]
        found[part] = (decoy & (row[:, 1:] == answers[part, None])).any(1)
    return found


def find_last_occurrences(
    inputs: Int[np.ndarray, "b t"], questions: Questions, answers: Int[np.ndarray, " w"]
) -> Int[np.ndarray, " w"]:
    """Return the last position of each answer up to its query; −1 where it does not occur."""
    found = np.full(len(questions), -1)
    place = np.arange(inputs.shape[1])
    for part in questions.iterate_blocks(inputs.shape[1]):
        some = questions[part]
        same = inputs[some.rows] == answers[part, None]
        same &= place <= some.positions[:, None]
        found[part] = np.where(same, place, -1).max(1)
    return found


def match_other_pairs(
    batch: Batch, questions: Questions, answers: Int[np.ndarray, " w"]
) -> Int[np.ndarray, " w"]:
    """Return the index of the other pair whose stored value each answer is; −1 if there is none."""
    found = np.full(len(questions), -1)
    if not has_pairs(batch):
        return found
    where = find_values(batch)
    tokens = np.take_along_axis(batch.inputs.cpu().numpy(), np.maximum(where, 0), 1)
    index = np.arange(where.shape[1])
    for part in questions.iterate_blocks(where.shape[1]):
        some = questions[part]
        same = tokens[some.rows] == answers[part, None]
        same &= (where[some.rows] >= 0) & (where[some.rows] < some.positions[:, None])
        same &= (index != some.pairs[:, None]) & (some.pairs >= 0)[:, None]
        found[part] = np.where(same.any(1), same.argmax(1), -1)
    return found


def find_values(batch: Batch) -> Int[np.ndarray, "b pairs"]:
    """Return the positions of the stored values, padded with −1."""
    return find_pairs(batch)[2].cpu().numpy()


def choose_causes(flags: dict[str, Bool[np.ndarray, "n w"]]) -> Int[np.ndarray, "n w"]:
    """Return the index into `CAUSES` of the first cause that applies; flags has all causes."""
    return np.select([flags[name] for name in CAUSES], list(range(len(CAUSES))))


def draw_wrong_answers(
    questions: Questions, pool: Int[np.ndarray, " q"], rounds: int, rng: np.random.Generator
) -> Int[np.ndarray, "rounds w"]:
    """Draw wrong answers from a pool of tokens; −1 where the pool holds only the right one."""
    kinds, count = np.unique(pool, return_counts=True)
    answers = rng.choice(kinds, (rounds, len(questions)), p=count / count.sum())
    for _ in range(64):
        same = answers == questions.targets
        if not same.any():
            return answers
        answers[same] = rng.choice(kinds, same.sum(), p=count / count.sum())
    return np.where(answers == questions.targets, -1, answers)


def draw_other_values(
    batch: Batch, questions: Questions, rng: np.random.Generator
) -> Int[np.ndarray, " w"]:
    """Draw the position of another pair's stored value for each question; −1 if there is none."""
    values = find_values(batch)
    found = np.full(len(questions), -1)
    for part in questions.iterate_blocks(values.shape[1]):
        some = questions[part]
        where = values[some.rows]
        legal = (where >= 0) & (where < some.positions[:, None])
        legal &= where != some.values[:, None]
        picked = np.where(legal, rng.random(legal.shape), -1.0).argmax(1)
        chosen = np.take_along_axis(where, picked[:, None], 1)[:, 0]
        found[part] = np.where(legal.any(1), chosen, -1)
    return found


def find_neighbours(
    batch: Batch, questions: Questions, pairs: Int[np.ndarray, " w"]
) -> tuple[Bool[np.ndarray, " g"], float]:
    """Find which answers from another pair come from the pair next to the right one.

    Returns:
        a flag for each error that answers another pair's value, and the share of flags if all
        other pairs of the row were equally likely; NaN where there are no such errors.
    """
    given = pairs >= 0
    if not given.any():
        return np.zeros(0, bool), math.nan
    some, values = questions[given], find_values(batch)
    late = np.where(values < 0, batch.inputs.shape[1], values)
    order = late.argsort(1, kind="stable").argsort(1)[some.rows]
    mine, theirs = (np.take_along_axis(order, p[:, None], 1) for p in (some.pairs, pairs[given]))
    legal = (values >= 0)[some.rows] & (order != mine)
    legal &= values[some.rows] < some.positions[:, None]
    beside = legal & (np.abs(order - mine) == 1)
    by_chance = (beside.sum(1) / legal.sum(1)).mean()
    return (np.abs(theirs - mine) == 1)[:, 0], float(by_chance)
