"""Whether answers depend on the key that is asked for, or on a position in the row."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from torch import Tensor

from analysis.base import NotApplicableError, Subject
from analysis.mechanism.effects import estimate_share
from analysis.mechanism.swapped_keys import look_up_answers, permute_tokens, solve_rows
from analysis.scoring import scored
from analysis.statistics.intervals import bound_share
from tasks.base import IGNORE, Batch


@dataclass(frozen=True)
class Measured:
    """A number that the label rests on.

    Attributes:
        name: what was measured.
        value: the number.
        interval: its 95 % interval, low and high.
    """

    name: str
    value: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Cues:
    """What answers follow when the keys or the values of a row change places, as shares.

    An answer follows the key if it is right in the row as drawn, and right again after all keys
    have changed places; a rule that ignores keys can never be both. It follows the position if it
    is a value of the row, stays the same when all keys change places, and becomes the token that
    moved to that value's position when all values change places.

    Attributes:
        key: share of answers that follow the key, in [0, 1].
        position: share that follow the position.
        either: the sum of both.
        of_either: `position / either`; NaN if no answer follows either.
    """

    key: Measured
    position: Measured
    either: Measured
    of_either: Measured


def measure_cues(subject: Subject, batch: Batch, rng: np.random.Generator) -> Cues:
    """Measure which answers follow the key and which the position.

    Raises:
        NotApplicableError: when no answer changes, or none is defined, after keys change places.
    """
    query, value = batch.links["query_pos"], batch.links["value_pos"]
    moved_keys, _ = permute_tokens(batch, "key_pos", rng)
    asked_after = solve_rows(subject.task, moved_keys).gather(1, query.clamp(min=0))
    target = batch.targets.gather(1, query.clamp(min=0))
    asked = (query >= 0) & (target != IGNORE) & (asked_after != IGNORE)
    # Where the right answer stays the same, a rule that ignores keys stays right too.
    asked &= asked_after != target
    if not asked.any():
        raise NotApplicableError("exchanging all keys leaves no answer that is defined and changes")
    values = batch.inputs.gather(1, value.clamp(min=0)).masked_fill(value < 0, IGNORE)
    answer = _compute_answers(subject, batch)
    named = (answer[:, :, None] == values[:, None]) & asked[:, :, None]
    place = named.int().argmax(-1)

    after_keys = _compute_answers(subject, moved_keys)
    by_key = (answer == target) & (after_keys == asked_after)
    moved_values, came_from = permute_tokens(batch, "value_pos", rng)
    now_there = values.gather(1, came_from.gather(1, place))
    by_position = named.any(-1) & (after_keys == answer) & ~by_key
    by_position &= _compute_answers(subject, moved_values) == now_there

    rows = asked.nonzero()[:, 0].cpu().numpy()
    key, position = (kept[asked].cpu().numpy() for kept in (by_key, by_position))
    either = key | position
    sums = np.stack([np.bincount(rows, of, len(query)) for of in (position, either)], 1)

    def measure_share(name: str, kept: Bool[np.ndarray, " q"]) -> Measured:
        return Measured(name, float(kept.mean()), bound_share(kept, rows, rng))

    return Cues(
        key=measure_share("follow the key", key),
        position=measure_share("follow the position", position),
        either=measure_share("follow either", either),
        of_either=Measured("of either, the position", *estimate_share(sums, rng)),
    )


def _compute_answers(subject: Subject, batch: Batch) -> Int[Tensor, "b pairs"]:
    return look_up_answers(scored(subject.model, batch), batch, batch.links["query_pos"])
