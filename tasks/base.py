"""What a task is: rows of tokens, each a pure function of (task, seed, split, row number)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

IGNORE = -100
"""The target of a position that is not scored (the convention of torch's cross-entropy)."""


class Links(Mapping[str, Tensor]):
    """Tensors by name, made when one is first looked at: training mostly needs none of them."""

    def __init__(self, make: Callable[[], dict[str, Tensor]]):
        self._make = make

    @cached_property
    def _made(self) -> dict[str, Tensor]:
        return self._make()

    def __getitem__(self, name: str) -> Tensor:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@dataclass(frozen=True)
class Batch:
    """Rows of a task.

    Attributes:
        inputs: int64 [b t], token ids.
        targets: int64 [b t], the right answer at scored positions, -100 elsewhere.
        roles: int64 [b t], an index into the task's `role_names`.
        links: int64 tensors that tie positions of a row together, task by task; -1 pads.
    """

    inputs: Tensor
    targets: Tensor
    roles: Tensor
    links: Mapping[str, Tensor]

    def __getitem__(self, rows: slice) -> "Batch":
        """Return some of the rows."""
        return Batch(
            self.inputs[rows],
            self.targets[rows],
            self.roles[rows],
            Links(lambda: {name: link[rows] for name, link in self.links.items()}),
        )

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same rows on another device."""
        return Batch(
            self.inputs.to(device),
            self.targets.to(device),
            self.roles.to(device),
            Links(lambda: {name: link.to(device) for name, link in self.links.items()}),
        )


MAX_ROWS = 2**36
"""Rows of a split: the counter behind them has 36 bits for the number."""

Predictor = Callable[[Batch], Tensor]
"""A rule that predicts int64 [b t] from a batch's inputs; scored like a model."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A synthetic task: a frozen dataclass whose fields are its options.

    A field's `metadata["help"]` is its text on the command line. Subclasses validate their
    fields in `__post_init__` and raise `ValueError` naming field, value and bound.
    """

    name: ClassVar[str]
    role_names: ClassVar[tuple[str, ...]]
    splits: ClassVar[tuple[str, ...]] = ("train", "test")

    seq_len: int
    vocab_size: int

    @abstractmethod
    def rows(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b], ≥ 0) on the device of `numbers`."""

    @abstractmethod
    def oracle(self, batch: Batch) -> Tensor:
        """Return the right answers, int64 [b t], from `batch.inputs` alone (-100 unscored)."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The accuracy of a uniform guess over the legal answers, in [0, 1]."""

    @abstractmethod
    def shortcuts(self) -> dict[str, Predictor]:
        """Return rules that look right without solving the task, by name."""

    def batch(
        self,
        *,
        split: str = "train",
        start: int = 0,
        size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Return rows start … start + size − 1 of a split.

        Raises:
            ValueError: for an unknown split, a negative start, a size below 1, or rows past the
                end of the split.
        """
        if split not in self.splits:
            raise ValueError(f"split={split!r}: {self.name} has {', '.join(self.splits)}")
        if start < 0:
            raise ValueError(f"start={start}: must be ≥ 0")
        if size < 1:
            raise ValueError(f"size={size}: must be ≥ 1")
        if start + size > MAX_ROWS:
            raise ValueError(f"start={start}, size={size}: a split has {MAX_ROWS} rows")
        numbers = torch.arange(start, start + size, device=device)
        return self.rows(split, numbers, seed)

    def options(self) -> dict[str, object]:
        """Return the fields by name: with `name`, enough to rebuild the task."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def accuracy(predicted: Tensor, targets: Tensor) -> float:
    """Return the share of scored positions where `predicted` [b t] equals `targets` [b t]."""
    scored = targets != IGNORE
    return (predicted[scored] == targets[scored]).double().mean().item()
