"""What a model answers at the scored positions of a batch; hooks on the model take effect."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lab.hooks import HookPoint
from lab.intervals import Estimate, estimate_ratio
from lab.models import LanguageModel
from lab.models.evaluation import score, tell_oracle_masks
from lab.ops.cross_entropy import linear_argmax
from tasks.base import Batch

PART_ENTRIES = 2**20
"""Logits in memory at once; in cache they take a third of the time of 16 times as many."""


@dataclass(frozen=True)
class Scored:
    """The scored positions of a batch, row by row, with the model's last hidden states.

    Of several right answers, `targets` has the one nearest to the model's.
    """

    rows: Int[Tensor, " q"]
    positions: Int[Tensor, " q"]
    targets: Int[Tensor, " q"] | Float[Tensor, "q v"]
    hidden: Float[Tensor, "q d"]
    head: Float[Tensor, "v d"]

    @cached_property
    def answers(self) -> Int[Tensor, " q"] | Float[Tensor, "q v"]:
        """The token of the highest logit; the numbers of a model that reads vectors."""
        if self.targets.is_floating_point():
            return self.hidden @ self.head.detach().T
        return linear_argmax(self.hidden, self.head)

    @property
    def right(self) -> Bool[Tensor, " q"]:
        """Whether the answer is the target."""
        return self.answers == self.targets

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.right.double().mean().item()

    @cached_property
    def losses(self) -> Float[Tensor, " q"]:
        """The cross-entropy at each position, nats."""
        size = max(1, PART_ENTRIES // len(self.head))
        parts = [
            torch.nn.functional.cross_entropy(hidden @ self.head.T, targets, reduction="none")
            for hidden, targets in zip(
                self.hidden.split(size), self.targets.split(size), strict=True
            )
        ]
        return torch.cat(parts)

    def find(self, position: Int[Tensor, "b ..."]) -> Int[Tensor, "b ..."]:
        """Return which of the scored positions are at some positions of each row; −1: none."""
        flat = position.flatten(1)
        size = 1 + max(int(part.max()) for part in (flat, self.positions) if part.numel())
        places = flat.new_full((len(flat), size), -1)
        places[self.rows, self.positions] = torch.arange(len(self.rows), device=flat.device)
        return places.gather(1, flat.clamp(min=0)).masked_fill(flat < 0, -1).view_as(position)

    def logits(self, tokens: Int[Tensor, "q k"]) -> Float[Tensor, "q k"]:
        """Return the logits of k given tokens at each position."""
        return torch.einsum("qd,qkd->qk", self.hidden, self.head[tokens])


@torch.no_grad()
def scored(model: LanguageModel, batch: Batch) -> Scored:
    """Run a model on a batch in fp32, and return what it answers at the scored positions."""
    rows, positions = batch.scored.nonzero(as_tuple=True)
    # All positions, as under a hook: an intervention that changes nothing gives the same bits.
    with tell_oracle_masks(model, batch):
        hidden = model.hidden(batch.inputs)[rows, positions]
    found = Scored(rows, positions, batch.targets[rows, positions], hidden, model.W_U.mT)
    if not batch.several:
        return found
    given = batch.targets.index_put((rows, positions), found.answers)
    return replace(found, targets=batch.find_nearest(given)[rows, positions])


@torch.no_grad()
def record(model: LanguageModel, batch: Batch, names: list[str]) -> dict[str, Tensor]:
    """Run a model on a batch in fp32, and return the tensors at these hook points, by name."""
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        seen[point.name] = tensor

    with model.hooks([(names, keep)]):
        score(model, batch, "fp32")
    return seen


def estimate_accuracy(answered: Scored, chance: float, rng: np.random.Generator) -> Estimate:
    """Estimate the share of right answers."""
    return estimate_ratio(*sum_by_row(answered, answered.right), chance, rng)


def sum_by_row(answered: Scored, values: Shaped[Tensor, " q"]) -> tuple[Tensor, Tensor]:
    """Return for each row the sum of values and the number of scored positions."""
    n_rows = int(answered.rows.max()) + 1
    sums = torch.bincount(answered.rows, values.double(), minlength=n_rows)
    return sums, torch.bincount(answered.rows, minlength=n_rows)
