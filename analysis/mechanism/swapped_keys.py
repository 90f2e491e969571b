"""Rows in which pairs have exchanged their keys: the same tokens, and other right answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.links import PAIR_LINKS, find_pairs
from analysis.scoring import Scored
from lab.ops.cross_entropy import linear_argmax
from tasks.base import IGNORE, Batch, Task

COUPLES = 12
"""Most couples of a row; at most half of its pairs are in one."""


@dataclass(frozen=True)
class Couples:
    """Pairs that exchange keys, c couples a row; every couple is asked about twice.

    Where a row has pairs (k, v) and (k′, v′), the other row has (k′, v) and (k, v′): two key
    tokens differ, every other token stands where it stood. The query for k has the right answer
    v in the one and v′ in the other. Couples of a row share no pair, so that what is done about
    one leaves the answers to the others alone, as far as a mixer keeps pairs apart; so several
    are measured in one pass.

    Attributes:
        clean: the rows as drawn.
        corrupt: the rows with exchanged keys.
        query: where each pair of each couple is asked about [b c 2].
        key: where its key is in the clean row [b c 2].
        value: where its value is in the clean row [b c 2].
        right: the token at `value` [b c 2].
        valid: couples whose answers do exchange, by the task's own oracle [b c].
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
        """The right answers of the corrupt rows: each other's."""
        return self.right.flip(-1)

    @property
    def rows(self) -> Int[Tensor, "b c 2"]:
        """Row of the batch of each query."""
        b = torch.arange(len(self.query), device=self.query.device)
        return b[:, None, None].expand_as(self.query)

    def __getitem__(self, rows: slice) -> "Couples":
        """Return those of some rows."""
        tensors = (self.query, self.key, self.value, self.right, self.valid)
        return Couples(self.clean[rows], self.corrupt[rows], *(of[rows] for of in tensors))


def couples(task: Task, batch: Batch, rng: np.random.Generator) -> Couples | None:
    """Draw couples of pairs in every row that stores two or more; None where no row does."""
    links = _once(find_pairs(batch))
    stored = (links[0] >= 0).sum(1)
    kept = (stored >= 2).nonzero()[:, 0]
    if not len(kept):
        return None
    links, stored = [link[kept] for link in links], stored[kept].tolist()
    batch = rows_of(batch, kept)
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
        for of in (batch.targets, solved(task, corrupt))
    )
    valid = ((answers == right) & (after == right.flip(-1))).all(-1)
    # Two pairs of one value exchange nothing.
    valid &= right[..., 0] != right[..., 1]
    return Couples(batch, corrupt, query, key, value, right, valid)


def solved(task: Task, batch: Batch) -> Int[Tensor, "b t"]:
    """Return the oracle's answers; `IGNORE` in rows that are none of the task's any more."""
    answers = torch.full_like(batch.inputs, IGNORE)
    for row in range(len(answers)):
        try:
            answers[row] = task.oracle(batch[row : row + 1])[0]
        except (LookupError, StopIteration, ValueError):
            continue
    return answers


def _once(links: Sequence[Int[Tensor, "b pairs"]]) -> list[Int[Tensor, "b pairs"]]:
    """Return the links of pairs whose key and value no earlier pair of the row has."""
    kept = links[0] >= 0
    for position in links[1:]:
        same = position[:, :, None] == position[:, None, :]
        kept &= ~same.tril(-1).any(-1)
    order = (~kept).long().argsort(dim=1, stable=True)
    return [link.masked_fill(~kept, -1).gather(1, order) for link in links]


def rows_of(batch: Batch, rows: Int[Tensor, " n"]) -> Batch:
    """Return some rows of a batch, in any order."""
    return Batch(
        batch.inputs[rows],
        batch.targets[rows],
        batch.roles[rows],
        {name: link[rows] for name, link in batch.links.items()},
    )


def permuted(
    batch: Batch, link: str, rng: np.random.Generator
) -> tuple[Batch, Int[Tensor, "b pairs"]]:
    """Return the rows with the tokens at a link's positions passed on to other pairs of the row.

    Each row's stored tokens move round in a circle, by 1 to K − 1 places drawn for it, so that
    none stays; the targets are left as they were.

    Returns:
        the rows, and for each pair the one whose token it got; itself where a row has one pair.
    """
    position = batch.links[link]
    given = torch.arange(position.shape[1], device=position.device).repeat(len(position), 1)
    for row, stored in enumerate((position >= 0).sum(1).tolist()):
        shift = int(rng.integers(1, stored)) if stored > 1 else 0
        given[row, :stored] = (given[row, :stored] + shift) % max(stored, 1)
    real = position >= 0
    source = position.clamp(min=0)
    tokens = batch.inputs.gather(1, source.gather(1, given))
    inputs = batch.inputs.clone()
    row = torch.arange(len(position), device=position.device)[:, None].expand_as(position)
    inputs[row[real], position[real]] = tokens[real]
    return replace(batch, inputs=inputs), given


def answers_at(found: Scored, batch: Batch, position: Int[Tensor, "b ..."]) -> Int[Tensor, "b ..."]:
    """Return what a model answers at scored positions; `IGNORE` where none is scored."""
    return _placed(found, batch, position, found.answers)


@torch.no_grad()
def margin(found: Scored, pairs: Couples) -> Float[Tensor, "b c 2"]:
    """Return logit(right in the clean row) − logit(right in the corrupt row) at every query."""
    places = torch.arange(len(found.rows), device=found.rows.device)
    places = _placed(found, pairs.clean, pairs.query, places).clamp(min=0)
    direction = found.head[pairs.right] - found.head[pairs.wrong]
    return (found.hidden[places] * direction).sum(-1)


@torch.no_grad()
def couple_answers(found: Scored, pairs: Couples) -> Int[Tensor, "b c 2"]:
    """Return what a model answers to the couples' queries."""
    places = torch.arange(len(found.rows), device=found.rows.device)
    places = _placed(found, pairs.clean, pairs.query, places).clamp(min=0)
    return linear_argmax(found.hidden[places.flatten()], found.head).view_as(pairs.query)


def _placed(
    found: Scored,
    batch: Batch,
    position: Int[Tensor, "b ..."],
    of_scored: Int[Tensor, " q"],
) -> Int[Tensor, "b ..."]:
    """Look up numbers of scored positions by position in the row."""
    grid = torch.full_like(batch.inputs, IGNORE)
    grid[found.rows, found.positions] = of_scored
    flat = position.flatten(1)
    looked = grid.gather(1, flat.clamp(min=0)).masked_fill(flat < 0, IGNORE)
    return looked.view_as(position)
