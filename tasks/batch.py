"""Rows of a task: tokens or vectors, targets, roles, and links between positions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tasks.lazy import Tensor, torch
from tasks.one_thread import use_one_thread

IGNORE = -100
"""The target of a position that is not scored (the convention of torch's cross-entropy)."""


class Links(Mapping[str, Tensor]):
    """Tensors by name, computed when one is first read: training needs hardly any of them.

    Args:
        make: computes all that are not known yet.
        known: those that can be read without computing the others.
    """

    def __init__(
        self,
        make: Callable[[], dict[str, Tensor]],
        known: Mapping[str, Tensor] | None = None,
    ):
        self._make, self.known = make, dict(known or {})

    @cached_property
    def _made(self) -> dict[str, Tensor]:
        with use_one_thread():
            return {**self._make(), **self.known}

    def __getitem__(self, name: str) -> Tensor:
        return self.known[name] if name in self.known else self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self):
        # `make` may be a closure, which cannot be pickled: the tensors are computed first.
        return Links, (dict, dict(self))


def _map_links(links: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> Links:
    """Return links each of which is changed when it is read."""
    known = links.known if isinstance(links, Links) else links
    return Links(
        lambda: {name: change(link) for name, link in links.items()},
        {name: change(link) for name, link in known.items()},
    )


@dataclass(frozen=True)
class Batch:
    """Rows of a task.

    Attributes:
        inputs: int64 [b t], token ids; of a `VectorTask` float32 [b t i], vectors.
        targets: int64 [b t], the right answer at scored positions, -100 elsewhere; of a
            `VectorTask` float32 [b t o], NaN elsewhere.
        roles: int64 [b t], an index into the task's `role_names`.
        links: int64 tensors that tie positions of a row together, task by task; -1 pads.
        several: whether the link `legal`, int64 [b t a], has every right answer of each scored
            position, of which the target is one; otherwise the target alone is right.
    """

    inputs: Tensor
    targets: Tensor
    roles: Tensor
    links: Mapping[str, Tensor]
    several: bool = False

    def find_nearest(self, answers: Tensor) -> Tensor:
        """Return the right answers nearest to those given, both int64 [b t].

        They are the targets; of several right answers the given one, if it is among them.
        """
        if not self.several:
            return self.targets
        legal = self.links["legal"][:, : answers.shape[1]]
        return answers.where((answers[:, :, None] == legal).any(2), self.targets)

    @property
    def scored(self) -> Tensor:
        """Which positions are scored, bool [b t]."""
        return find_scored(self.targets)

    def __getitem__(self, rows: slice | Tensor) -> "Batch":
        """Return some of the rows, by slice or by index."""
        return self.take(rows, self.inputs.shape[1])

    def take(self, rows: slice | Tensor, seq_len: int) -> "Batch":
        """Return some of the rows, by slice or by index, cut to their first seq_len positions."""
        return Batch(
            self.inputs[rows, :seq_len],
            self.targets[rows, :seq_len],
            self.roles[rows, :seq_len],
            _map_links(self.links, lambda link: link[rows]),
            self.several,
        )

    def cut(self, seq_len: int) -> "Batch":
        """Return the last positions of the rows, without links; a long row is scored at its end."""
        parts = (part[:, -seq_len:] for part in (self.inputs, self.targets, self.roles))
        return Batch(*parts, links={})

    def trim(self) -> "Batch":
        """Return the batch without the columns after the last scored position of any row."""
        scored = self.scored.any(0).nonzero()
        return self.take(slice(None), int(scored[-1]) + 1) if len(scored) else self

    def to(self, device: "torch.device | str") -> "Batch":
        """Return the same rows on another device."""
        return Batch(
            self.inputs.to(device),
            self.targets.to(device),
            self.roles.to(device),
            _map_links(self.links, lambda link: link.to(device)),
            self.several,
        )


Predictor = Callable[[Batch], Tensor]
"""Predicts targets, of their shape and type, from a batch's inputs, and is scored like a model."""

Surprisal = Callable[[Batch], Tensor]
"""Returns the bits that each target takes, float64 [b t], by a predictor with probabilities."""


def find_scored(targets: Tensor) -> Tensor:
    """Return which positions are scored, bool [b t], by targets [b t], or [b t o] of vectors."""
    if targets.is_floating_point():
        return ~targets.isnan().any(-1)
    return targets != IGNORE


def accuracy(predicted: Tensor, targets: Tensor) -> float:
    """Return the share of scored positions where `predicted` [b t] equals `targets` [b t]."""
    scored = targets != IGNORE
    return (predicted[scored] == targets[scored]).double().mean().item()


def count_right(answers: Tensor, targets: Tensor) -> Tensor:
    """Return how much of each row's targets some answers get right, [b].

    Of tokens it is the number of right answers; of numbers y answered by ŷ it is Σy² − Σ(y − ŷ)²,
    what the answers explain of the sum of squares, over all scored positions.
    """
    if targets.is_floating_point():
        return (targets.double().square() - (targets.double() - answers).square()).nansum((1, 2))
    return ((targets != IGNORE) & (answers == targets)).sum(1)


def count_rows(tokens: int, seq_len: int, *, fewest: int = 1, most: int | None = None) -> int:
    """Return how many rows of a length a budget of tokens covers, rounded down.

    Args:
        tokens: the budget.
        seq_len: tokens a row.
        fewest: rows to return even where they exceed the budget.
        most: rows never to exceed, not even for `fewest`.
    """
    rows = max(fewest, tokens // seq_len)
    return rows if most is None else min(rows, most)
