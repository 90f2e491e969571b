"""Why an answer is wrong: what the row says about it.

Axis letter of this file, beside the package's: w wrong answer.
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
"""In the order of precedence: an error goes to the first that holds."""
BLOCK_ENTRIES = 2**22
"""Tokens that are compared with answers at once."""


@dataclass(frozen=True)
class Asked:
    """Scored positions, and where what they ask for was stored.

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

    def __getitem__(self, chosen: np.ndarray | slice) -> "Asked":
        """Return some of them."""
        return Asked(*(part[chosen] for part in vars(self).values()))

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self, width: int) -> Iterator[slice]:
        """Yield a few of them at a time, each of which takes `width` entries."""
        size = max(1, BLOCK_ENTRIES // max(1, width))
        yield from (slice(i, i + size) for i in range(0, len(self), size))


def asked(batch: Batch) -> Asked:
    """Return the scored positions of a batch, row by row."""
    rows, positions = (batch.targets != IGNORE).cpu().numpy().nonzero()
    targets = batch.targets.cpu().numpy()[rows, positions]
    none = np.full(len(rows), -1)
    if not has_pairs(batch):
        return Asked(rows, positions, targets, none, none, none)
    query, key, value = (link.cpu().numpy() for link in find_pairs(batch))
    pair_at = np.full(batch.targets.shape, -1)
    row, pair = (query >= 0).nonzero()
    pair_at[row, query[row, pair]] = pair
    pairs = pair_at[rows, positions]
    found = pairs >= 0
    return Asked(
        rows,
        positions,
        targets,
        pairs,
        np.where(found, key[rows, pairs], -1),
        np.where(found, value[rows, pairs], -1),
    )


def follows_decoy(
    inputs: Int[np.ndarray, "b t"], asked: Asked, answers: Int[np.ndarray, " w"]
) -> Bool[np.ndarray, " w"]:
    """Whether an answer is the token after an earlier token that equals the key.

    The stored key itself is no decoy; without pairs there is none.
    """
    found = np.zeros(len(asked), bool)
    place = np.arange(inputs.shape[1] - 1)
    for part in asked.blocks(inputs.shape[1]):
        some, row = asked[part], inputs[asked.rows[part]]
        key = row[np.arange(len(some)), some.positions]
        decoy = (row[:, :-1] == key[:, None]) & (place < some.positions[:, None])
        decoy &= (place != some.keys[:, None]) & (some.pairs >= 0)[:, None]
        found[part] = (decoy & (row[:, 1:] == answers[part, None])).any(1)
    return found


def last_seen(
    inputs: Int[np.ndarray, "b t"], asked: Asked, answers: Int[np.ndarray, " w"]
) -> Int[np.ndarray, " w"]:
    """Return where an answer was last read, up to the query itself; −1 where it was not."""
    found = np.full(len(asked), -1)
    place = np.arange(inputs.shape[1])
    for part in asked.blocks(inputs.shape[1]):
        some = asked[part]
        same = inputs[some.rows] == answers[part, None]
        same &= place <= some.positions[:, None]
        found[part] = np.where(same, place, -1).max(1)
    return found


def other_pairs(
    batch: Batch, asked: Asked, answers: Int[np.ndarray, " w"]
) -> Int[np.ndarray, " w"]:
    """Return which other pair's stored value an answer is, by index; −1 where it is none's."""
    found = np.full(len(asked), -1)
    if not has_pairs(batch):
        return found
    where = values_at(batch)
    tokens = np.take_along_axis(batch.inputs.cpu().numpy(), np.maximum(where, 0), 1)
    index = np.arange(where.shape[1])
    for part in asked.blocks(where.shape[1]):
        some = asked[part]
        same = tokens[some.rows] == answers[part, None]
        same &= (where[some.rows] >= 0) & (where[some.rows] < some.positions[:, None])
        same &= (index != some.pairs[:, None]) & (some.pairs >= 0)[:, None]
        found[part] = np.where(same.any(1), same.argmax(1), -1)
    return found


def values_at(batch: Batch) -> Int[np.ndarray, "b pairs"]:
    """Return where the stored values are; −1 behind a row's last."""
    return find_pairs(batch)[2].cpu().numpy()


def first_of(flags: dict[str, Bool[np.ndarray, "n w"]]) -> Int[np.ndarray, "n w"]:
    """Return the first cause that holds, an index into `CAUSES`; the flags have all of them."""
    return np.select([flags[name] for name in CAUSES], list(range(len(CAUSES))))


def redrawn(
    asked: Asked, pool: Int[np.ndarray, " q"], rounds: int, rng: np.random.Generator
) -> Int[np.ndarray, "rounds w"]:
    """Return wrong answers drawn from a pool of tokens; −1 where it holds the right one alone."""
    kinds, count = np.unique(pool, return_counts=True)
    fig = rng.choice(kinds, (rounds, len(asked)), p=count / count.sum())
    for _ in range(64):
        same = fig == asked.targets
        if not same.any():
            return fig
        fig[same] = rng.choice(kinds, same.sum(), p=count / count.sum())
    return np.where(fig == asked.targets, -1, fig)


def other_value(batch: Batch, asked: Asked, rng: np.random.Generator) -> Int[np.ndarray, " w"]:
    """Return where another pair's value is stored, one at random; −1 where there is no other."""
    values = values_at(batch)
    found = np.full(len(asked), -1)
    for part in asked.blocks(values.shape[1]):
        some = asked[part]
        where = values[some.rows]
        legal = (where >= 0) & (where < some.positions[:, None])
        legal &= where != some.values[:, None]
        fig = np.where(legal, rng.random(legal.shape), -1.0).argmax(1)
        chosen = np.take_along_axis(where, fig[:, None], 1)[:, 0]
        found[part] = np.where(legal.any(1), chosen, -1)
    return found


def next_door(batch: Batch, asked: Asked, pairs: Int[np.ndarray, " w"]) -> tuple[float, float]:
    """Return how many of the other pairs that were answered are stored next to the right one.

    Returns:
        the share of the errors with such an answer, and what it would be if every other pair of
        the row were as likely; NaN where there are none.
    """
    given = pairs >= 0
    if not given.any():
        return math.nan, math.nan
    some, values = asked[given], values_at(batch)
    late = np.where(values < 0, batch.inputs.shape[1], values)
    order = late.argsort(1, kind="stable").argsort(1)[some.rows]
    mine, theirs = (np.take_along_axis(order, p[:, None], 1) for p in (some.pairs, pairs[given]))
    legal = (values >= 0)[some.rows] & (order != mine)
    legal &= values[some.rows] < some.positions[:, None]
    beside = legal & (np.abs(order - mine) == 1)
    by_chance = (beside.sum(1) / legal.sum(1)).mean()
    return float((np.abs(theirs - mine) == 1).mean()), float(by_chance)
