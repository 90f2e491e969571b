"""What an answer goes by: the key that is asked for, or a position in the row."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from torch import Tensor

from analysis.base import NotApplicableError, Subject
from analysis.mechanism.effects import share
from analysis.mechanism.swapped_keys import answers_at, permuted, solved
from analysis.scoring import scored
from analysis.statistics.intervals import bound_share
from tasks.base import IGNORE, Batch


@dataclass(frozen=True)
class Measured:
    """A number that the label rests on.

    Attributes:
        name: what was measured.
        value: the number.
        interval: 95 %, low and high.
    """

    name: str
    value: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Cues:
    """Shares of answers by what they follow when keys or values of a row change places.

    An answer follows the key if it is right in the row, and right again when all keys have changed
    places: no rule that is blind to keys is ever both. It follows the position if it is some value
    of the row, stays that value when all keys have changed places, and is the token that came to
    its place when all values have.

    Attributes:
        key: share of answers that follow the key, in [0, 1].
        position: share that follow the position.
        either: the sum of both.
        of_either: the position's part in it; NaN where no answer follows either.
    """

    key: Measured
    position: Measured
    either: Measured
    of_either: Measured


def cues(subject: Subject, batch: Batch, rng: np.random.Generator) -> Cues:
    """Measure which answers follow keys and which positions.

    Raises:
        NotApplicableError: when no row is still one of the task's with its keys in other places.
    """
    query, value = batch.links["query_pos"], batch.links["value_pos"]
    moved_keys, _ = permuted(batch, "key_pos", rng)
    asked_after = solved(subject.task, moved_keys).gather(1, query.clamp(min=0))
    target = batch.targets.gather(1, query.clamp(min=0))
    asked = (query >= 0) & (target != IGNORE) & (asked_after != IGNORE)
    # Where the right answer stays, rules that are blind to keys stay right too.
    asked &= asked_after != target
    if not asked.any():
        raise NotApplicableError("no answer changes, or is defined, once all keys change places")
    values = batch.inputs.gather(1, value.clamp(min=0)).masked_fill(value < 0, IGNORE)
    answer = _answers(subject, batch)
    named = (answer[:, :, None] == values[:, None]) & asked[:, :, None]
    place = named.int().argmax(-1)

    after_keys = _answers(subject, moved_keys)
    by_key = (answer == target) & (after_keys == asked_after)
    moved_values, came_from = permuted(batch, "value_pos", rng)
    now_there = values.gather(1, came_from.gather(1, place))
    by_position = named.any(-1) & (after_keys == answer) & ~by_key
    by_position &= _answers(subject, moved_values) == now_there

    rows = asked.nonzero()[:, 0].cpu().numpy()
    key, position = (kept[asked].cpu().numpy() for kept in (by_key, by_position))
    either = key | position
    sums = np.stack([np.bincount(rows, of, len(query)) for of in (position, either)], 1)

    def measured(name: str, kept: Bool[np.ndarray, " q"]) -> Measured:
        return Measured(name, float(kept.mean()), bound_share(kept, rows, rng))

    return Cues(
        key=measured("follow the key", key),
        position=measured("follow the position", position),
        either=measured("follow either", either),
        of_either=Measured("of either, the position", *share(sums, rng)),
    )


def _answers(subject: Subject, batch: Batch) -> Int[Tensor, "b pairs"]:
    return answers_at(scored(subject.model, batch), batch, batch.links["query_pos"])
