"""The loss of a training step and its gradients: of one model, or of several of one shape at once.

Lanes are models that differ in their weights and rows alone. Their weights are stacked, and one
forward and backward pass computes all of them (`lab.ops.lanes`). Each lane has the loss and the
gradients that it would have alone, up to rounding: sums may be in another order. Axis letter of
this file, besides the package's: z lane.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lab.layers.mask import has_oracle_mask, reveal_stored
from lab.layers.routed import collect_balance_losses
from lab.models import LanguageModel
from lab.models.evaluation import choose_autocast, find_stored_positions, score
from lab.models.reading import find_even_places, find_places, read_hidden_at
from lab.ops.cross_entropy import linear_cross_entropy
from lab.ops.lanes import map_lanes
from tasks.base import IGNORE, Batch


class StepResult(NamedTuple):
    """What a forward and backward pass found, besides the gradients.

    Attributes:
        loss: mean cross-entropy at the scored positions, nats, without balance losses.
        correct: how many of them have the right answer.
        scored: how many there are; a tensor where nothing waited for a GPU to count them.
        norm: of the gradients, before they were clipped; None: they are not clipped yet.
    """

    loss: Tensor
    correct: Tensor
    scored: int | Tensor
    norm: Tensor | None = None


class StepShare(NamedTuple):
    """What share a batch has of the rows of a step, and of their scored positions, in (0, 1]."""

    rows: float = 1.0
    scored: float = 1.0


def differentiate(
    model: LanguageModel,
    batch: Batch,
    precision: str,
    part: StepShare | None = None,
    per_row: int | None = None,
) -> StepResult:
    """Add the gradient of the loss on a batch to a model's parameters.

    Args:
        model: whose weights are trained.
        batch: the rows.
        precision: "fp32" or "bf16".
        part: of a step that they are; the parts' gradients add up to that of the step. None: all.
        per_row: as in `lab.models.evaluation.score`.
    """
    with collect_balance_losses(model) as imbalances:
        hidden, weight, targets = score(model, batch, precision, per_row)
    padded = per_row is not None
    loss, correct = linear_cross_entropy(hidden, weight, targets, padded=padded)
    if part is None:
        sum(imbalances, start=loss).backward()
    else:
        (part.scored * loss + part.rows * sum(imbalances)).backward()
    scored = (targets >= 0).sum() if padded else len(targets)
    return StepResult(loss.detach(), correct, scored)


def differentiate_lanes(
    models: Sequence[LanguageModel],
    batches: Sequence[Batch],
    precision: str,
    per_row: int | None = None,
) -> list[StepResult]:
    """Set the gradients of several models of one shape, each on its own batch of one shape.

    Args:
        models: the lanes' own.
        batches: their rows.
        precision: "fp32" or "bf16".
        per_row: as in `lab.models.evaluation.score`, of all lanes.

    Raises:
        RuntimeError: for a model that `torch.func.vmap` cannot run, such as one with dropout.
    """
    weights = {f"model.{n}": _stack(models, n) for n, _ in models[0].named_parameters()}
    buffers = {
        f"model.{n}": torch.stack([model.get_buffer(n) for model in models])
        for n, _ in models[0].named_buffers()
    }
    tokens = torch.stack([batch.inputs for batch in batches])
    scored = torch.stack([batch.targets != IGNORE for batch in batches])
    rows = scored.flatten(0, 1)
    places = find_places(rows) if per_row is None else find_even_places(rows, per_row)
    at = places.at.unflatten(0, scored.shape[:2])
    stored = None
    if has_oracle_mask(models[0]):
        stored = torch.stack([find_stored_positions(batch) for batch in batches])
    reader = _Reader(models[0], places.end)

    def read_lane(*lane):
        return torch.func.functional_call(reader, lane[:2], lane[2:])

    given = (weights, buffers, tokens, at, *(() if stored is None else (stored,)))
    with choose_autocast(tokens.device, precision):
        hidden, *imbalances = map_lanes(read_lane)(*given)
    padded = per_row is not None
    counts = [at[0].numel() if padded else int(each.sum()) for each in scored]
    read = hidden.flatten(0, 2).index_select(0, places.chosen).split(counts)
    head = "model.embed.weight" if "model.head.weight" not in weights else "model.head.weight"
    outcomes, losses = [], [each.sum() for each in imbalances]
    for z, (rows, weight, batch) in enumerate(
        zip(read, weights[head].unbind(), batches, strict=True)
    ):
        targets = batch.targets
        targets = targets.gather(1, at[z]).flatten() if padded else targets[targets != IGNORE]
        if precision == "bf16":
            rows, weight = rows.bfloat16(), weight.bfloat16()
        loss, correct = linear_cross_entropy(rows, weight, targets, padded=padded)
        losses.append(loss)
        found = (targets >= 0).sum() if padded else counts[z]
        outcomes.append(StepResult(loss.detach(), correct, found))
    # A lane's weights reach its own loss alone, so the sum has every lane's gradients.
    torch.stack(losses).sum().backward()
    for name, stacked in weights.items():
        if stacked.grad is not None:
            for model, grad in zip(models, stacked.grad.unbind(), strict=True):
                model.get_parameter(name.removeprefix("model.")).grad = grad
    return outcomes


class _Reader(nn.Module):
    """Returns a model's hidden states at some positions, and its balance losses."""

    def __init__(self, model: LanguageModel, end: int):
        super().__init__()
        self.model, self.end = model, end

    def forward(self, tokens: Tensor, at: Tensor, stored: Tensor | None = None):
        if stored is not None:
            with reveal_stored(self.model, stored):
                return self(tokens, at)
        with collect_balance_losses(self.model) as imbalances:
            hidden = read_hidden_at(self.model, tokens, at, self.end)
        return hidden, *imbalances


def _stack(models: Sequence[LanguageModel], name: str) -> Tensor:
    """Return the lanes' values of a parameter, [z …], as a leaf that gets their gradients."""
    lanes = [model.get_parameter(name) for model in models]
    return torch.stack([lane.detach() for lane in lanes]).requires_grad_(lanes[0].requires_grad)
