"""Rows in which pairs have exchanged their keys: the same tokens, but other right answers.

Answers follow the key that is asked for, or a position of the row, or neither.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.base import NotApplicableError, Subject
from analysis.links import PAIR_LINKS, find_pairs
from analysis.scoring import Scored, scored
from lab.intervals import bound_share, resample_sums
from lab.models import LanguageModel
from lab.ops.cross_entropy import linear_argmax
from tasks.base import IGNORE, Batch, Task

COUPLES = 12
"""Maximum number of couples in a row; at most half of its pairs belong to one."""


@dataclass(frozen=True)
class Couples:
    """Couples of pairs that exchange their keys, c in each row, with two queries each.

    Where the clean row has pairs (k, v) and (k′, v′), the corrupt row has (k′, v) and (k, v′).
    Only the two key tokens differ. The right answer to the query for k is v in the clean row and
    v′ in the corrupt one. No two couples of a row share a pair, so an intervention on one leaves
    the answers to the others alone, as far as the mixer keeps pairs apart. Therefore one forward
    pass measures several couples.

    Attributes:
        query: position of the query about each pair of each couple [b c 2].
        key: position of its key in the clean row [b c 2].
        value: position of its value in the clean row [b c 2].
        right: the token at `value` [b c 2].
        valid: whether the couple's answers change places, by the task's oracle [b c].
    """

    clean: Batch
    corrupt: Batch
    query: Int[Tensor, "b c 2"]
    key: Int[Tensor, "b c 2"]
    value: Int[Tensor, "b c 2"]
    right: Int[Tensor, "b c 2"]
    valid: Bool[Tensor, "b c"]

    @property
    def wrong(self) -> Int[Tensor, "b c 2"]:
        """The right answers in the corrupt rows, which are those of the other pair."""
        return self.right.flip(-1)

    @property
    def rows(self) -> Int[Tensor, "b c 2"]:
        """The batch row of each query."""
        b = torch.arange(len(self.query), device=self.query.device)
        return b[:, None, None].expand_as(self.query)

    def shift_values(self, offset: int) -> "Couples":
        """Put `value` some positions later; couples whose keys lie there are no longer valid."""
        if not offset:
            return self
        value = (self.value + offset).clamp(max=self.clean.inputs.shape[1] - 1)
        taken = (self.key[..., None] == value.flatten(1)[:, None, None]).any(-1)
        return replace(self, value=value, valid=self.valid & ~taken.any(-1))

    def __getitem__(self, rows: slice) -> "Couples":
        """Return the couples of some rows."""
        tensors = (self.query, self.key, self.value, self.right, self.valid)
        return Couples(self.clean[rows], self.corrupt[rows], *(of[rows] for of in tensors))


def draw_couples(task: Task, batch: Batch, rng: np.random.Generator) -> Couples | None:
    """Draw couples in every row that stores at least two pairs; None if there is no such row."""
    links = _drop_duplicates(find_pairs(batch))
    stored = (links[0] >= 0).sum(1)
    kept = (stored >= 2).nonzero()[:, 0]
    if not len(kept):
        return None
    links, stored = [link[kept] for link in links], stored[kept].tolist()
    batch = batch[kept]
    batch = replace(batch, links={**batch.links, **dict(zip(PAIR_LINKS, links, strict=True))})
    many = max(1, min(COUPLES, min(stored) // 4))
    chosen = np.stack([rng.permutation(n)[: 2 * many] for n in stored])
    chosen = torch.from_numpy(chosen).to(batch.inputs.device)
    query, key, value = (link.gather(1, chosen).unflatten(1, (many, 2)) for link in links)
    tokens = batch.inputs.gather(1, key.flatten(1)).unflatten(1, (many, 2))
    inputs = batch.inputs.scatter(1, key.flatten(1), tokens.flip(-1).flatten(1))
    corrupt = replace(batch, inputs=inputs)
    right = batch.inputs.gather(1, value.flatten(1)).unflatten(1, (many, 2))
    answers, after = (
        of.gather(1, query.flatten(1)).unflatten(1, (many, 2))
        for of in (batch.targets, solve_rows(task, corrupt))
    )
    valid = ((answers == right) & (after == right.flip(-1))).all(-1)
    # Pairs with the same value have the same answer before and after.
    valid &= right[..., 0] != right[..., 1]
    return Couples(batch, corrupt, query, key, value, right, valid)


def solve_rows(task: Task, batch: Batch) -> Int[Tensor, "b t"]:
    """Return the oracle's answers; `IGNORE` in edited rows that the oracle cannot read."""
    answers = torch.full_like(batch.inputs, IGNORE)
    for row in range(len(answers)):
        try:
            answers[row] = task.oracle(batch[row : row + 1])[0]
        except (LookupError, StopIteration, ValueError):
            continue
    return answers


def _drop_duplicates(links: Sequence[Int[Tensor, "b pairs"]]) -> list[Int[Tensor, "b pairs"]]:
    """Keep only pairs whose key and value belong to no earlier pair of the row."""
    kept = links[0] >= 0
    for position in links[1:]:
        same = position[:, :, None] == position[:, None, :]
        kept &= ~same.tril(-1).any(-1)
    order = (~kept).long().argsort(dim=1, stable=True)
    return [link.masked_fill(~kept, -1).gather(1, order) for link in links]


def permute_tokens(
    batch: Batch, link: str, rng: np.random.Generator
) -> tuple[Batch, Int[Tensor, "b pairs"]]:
    """Move the tokens at a link's positions to other pairs of the same row.

    In each row the stored tokens rotate by a random 1 to K − 1 places, so none stays where it
    was. The targets are left unchanged.

    Returns:
        the rows, and for each pair the pair whose token it got (itself in a row with one pair).
    """
    position = batch.links[link]
    stored = (position >= 0).sum(1, keepdim=True)
    shifts = [[int(rng.integers(1, n)) if n > 1 else 0] for n in stored[:, 0].tolist()]
    pair = torch.arange(position.shape[1], device=position.device)
    moved = (pair + torch.tensor(shifts, device=position.device)) % stored.clamp(min=1)
    given = torch.where(pair < stored, moved, pair)
    tokens = batch.inputs.gather(1, position.clamp(min=0).gather(1, given))
    inputs = batch.inputs.clone()
    row, real = (position >= 0).nonzero(as_tuple=True)
    inputs[row, position[row, real]] = tokens[row, real]
    return replace(batch, inputs=inputs), given


@torch.no_grad()
def compute_margins(found: Scored, pairs: Couples) -> Float[Tensor, "b c 2"]:
    """Return logit(right in the clean row) − logit(right in the corrupt row) for each query."""
    direction = found.head[pairs.right] - found.head[pairs.wrong]
    return (found.hidden[found.find(pairs.query).clamp(min=0)] * direction).sum(-1)


@torch.no_grad()
def compute_answers(found: Scored, query: Int[Tensor, "b ..."]) -> Int[Tensor, "b ..."]:
    """Return the model's answers at some positions; `IGNORE` at positions that are not scored."""
    places = found.find(query)
    answers = linear_argmax(found.hidden[places.clamp(min=0).flatten()], found.head)
    return answers.view_as(query).masked_fill(places < 0, IGNORE)


@dataclass(frozen=True)
class Baseline:
    """Couples, and their margins without any intervention.

    Attributes:
        pairs: the couples; every sum is over the valid ones.
        clean: margins on the clean rows [b c 2].
        corrupt: margins on the rows with exchanged keys.
    """

    pairs: Couples
    clean: Float[Tensor, "b c 2"]
    corrupt: Float[Tensor, "b c 2"]

    def sum_changes(
        self, margins: Float[Tensor, "b c 2"], chosen: Bool[Tensor, " c"] | None = None
    ) -> Float[np.ndarray, "b 2"]:
        """Return Σ (margins − corrupt) and Σ (clean − corrupt) per row, over the chosen couples."""
        valid = self.pairs.valid if chosen is None else self.pairs.valid & chosen
        changes = torch.stack([margins - self.corrupt, self.clean - self.corrupt], -1).double()
        return (changes * valid[:, :, None, None]).sum((1, 2)).cpu().numpy()

    def shift_values(self, offset: int) -> "Baseline":
        """Put the couples' values some positions later."""
        return replace(self, pairs=self.pairs.shift_values(offset))

    def __getitem__(self, rows: slice) -> "Baseline":
        """Return the couples of some rows."""
        return Baseline(self.pairs[rows], self.clean[rows], self.corrupt[rows])


def measure_baseline(model: LanguageModel, pairs: Couples) -> Baseline:
    """Measure the margins without any intervention."""
    clean, corrupt = (
        compute_margins(scored(model, rows), pairs) for rows in (pairs.clean, pairs.corrupt)
    )
    return Baseline(pairs, clean, corrupt)


def estimate_share(
    sums: Float[np.ndarray, "b 2"], rng: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """Return a ratio of sums over rows and its 95 % interval; NaN if the divisor is not positive.

    The interval is NaN as soon as one resample has no positive divisor: dropping such resamples
    would make the interval too narrow.
    """
    above, below = sums.sum(0)
    share = float(above / below) if below > 0 else math.nan
    if len(sums) > 1:
        over, under = resample_sums(sums, rng).T
        if (under > 0).all():
            low, high = np.quantile(over / under, [0.025, 0.975])
            return share, (float(low), float(high))
    return share, (math.nan, math.nan)


@dataclass(frozen=True)
class Measured:
    """A number that the label rests on."""

    name: str
    value: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Followed:
    """What answers follow when the keys or the values of a row change places, as shares.

    An answer follows the key if it is right in the row as drawn, and right again after all keys
    have changed places; a rule that ignores keys can never be both. It follows the position if it
    is a value of the row, stays the same when all keys change places, and becomes the token that
    moved to that value's position when all values change places.

    Attributes:
        of_either: `position / either`; NaN if no answer follows either.
    """

    key: Measured
    position: Measured
    either: Measured
    of_either: Measured


def measure_followed(subject: Subject, batch: Batch, rng: np.random.Generator) -> Followed:
    """Measure which answers follow the key and which the position.

    Raises:
        NotApplicableError: when no answer changes, or none is defined, after keys change places.
    """
    query, value = batch.links["query_pos"], batch.links["value_pos"]

    def answer_queries(rows: Batch) -> Int[Tensor, "b pairs"]:
        return compute_answers(scored(subject.model, rows), query)

    moved_keys, _ = permute_tokens(batch, "key_pos", rng)
    asked_after = solve_rows(subject.task, moved_keys).gather(1, query.clamp(min=0))
    target = batch.targets.gather(1, query.clamp(min=0))
    asked = (query >= 0) & (target != IGNORE) & (asked_after != IGNORE)
    # Where the right answer stays the same, a rule that ignores keys stays right too.
    asked &= asked_after != target
    if not asked.any():
        raise NotApplicableError("exchanging all keys leaves no answer that is defined and changes")
    values = batch.inputs.gather(1, value.clamp(min=0)).masked_fill(value < 0, IGNORE)
    answer = answer_queries(batch)
    named = (answer[:, :, None] == values[:, None]) & asked[:, :, None]
    place = named.int().argmax(-1)

    after_keys = answer_queries(moved_keys)
    by_key = (answer == target) & (after_keys == asked_after)
    moved_values, came_from = permute_tokens(batch, "value_pos", rng)
    now_there = values.gather(1, came_from.gather(1, place))
    by_position = named.any(-1) & (after_keys == answer) & ~by_key
    by_position &= answer_queries(moved_values) == now_there

    rows = asked.nonzero()[:, 0].cpu().numpy()
    key, position = (kept[asked].cpu().numpy() for kept in (by_key, by_position))
    either = key | position
    sums = np.stack([np.bincount(rows, of, len(query)) for of in (position, either)], 1)

    def measure_share(name: str, kept: Bool[np.ndarray, " q"]) -> Measured:
        return Measured(name, float(kept.mean()), bound_share(kept, rows, rng))

    return Followed(
        key=measure_share("follow the key", key),
        position=measure_share("follow the position", position),
        either=measure_share("follow either", either),
        of_either=Measured("of either, the position", *estimate_share(sums, rng)),
    )
