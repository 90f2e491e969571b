"""How much memory a run takes: estimated from small steps, refused where it is not free.

    weights + moments of the optimizer + rows drawn ahead + the largest of
        a step's gradients and activations, in proportion to the rows, and a checkpoint on its way
            to the disk, which seldom fits into what the step has freed
        gradients and the optimizer's own tensors
        what scores shortcuts, after training

The activations are measured on a step of about a thousand tokens and one of twice as many, so the
estimate holds for mixers of the user, too. From several thousand tokens on, the loss and state
spaces work block by block, and take less for each token. So where memory seems too small, steps of
eight and of sixteen thousand tokens are measured. What Python and torch take themselves is not
included.
"""

import math
from dataclasses import dataclass
from functools import partial

from lab.machine.allocation import Allocations
from lab.machine.growth import (
    FRAGMENTS,
    MANY_TOKENS,
    TOKENS,
    Closest,
    Growth,
    estimate_closely,
)
from lab.machine.memory import DoesNotFitError, format_bytes, measure_free_memory
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.models.memory import measure_model
from lab.ops.cross_entropy import linear_cross_entropy
from lab.training.runs import Run
from lab.training.state import start
from tasks.base import Batch, count_rows
from tasks.reader import count_tokens_ahead

PREDICTORS = 200
"""Bytes per token that scoring shortcuts takes, after training."""
AHEAD = 72
"""Bytes per token of rows drawn ahead, at most. Tasks take 16 to 36, and mixtures up to 55; where
an oracle mask reads the links, up to 70."""
COPIES = 4
"""Numbers per parameter: itself, its gradient, and at most two moments."""


@dataclass(frozen=True)
class Footprint:
    """The bytes that training takes at a time.

    Attributes:
        weights: of a model.
        kept: weights, moments and rows drawn ahead, throughout.
        step: activations and gradients of a step, by its rows.
        gradients: of all parameters.
        update: what the optimizer makes.
        rows: of a step.
        checkpoint: what a checkpoint takes on its way to the disk.
        shortcuts: what scores them, after training, in memory that the steps have freed.
    """

    weights: int
    kept: int
    step: Growth
    gradients: int
    update: int
    rows: int
    checkpoint: int
    shortcuts: int

    @property
    def total(self) -> int:
        """All of them at the worst moment."""
        return self.count_lanes(1)

    def count_lanes(self, lanes: int) -> int:
        """Return what several runs take that compute together.

        Each has weights, moments, gradients and activations of its own, and their weights are
        stacked. Optimizers take their steps, and checkpoints are written, one after another.
        """
        stacked = lanes * self.weights if lanes > 1 else 0
        step = lanes * FRAGMENTS * self.step.count_bytes(self.rows) + stacked
        update = lanes * self.gradients + self.update
        return lanes * self.kept + int(max(step + self.checkpoint, update, self.shortcuts))

    def count_fitting_rows(self, limit: int) -> int:
        """Return how many rows a step may have within a number of bytes."""
        if self.kept + self.shortcuts > limit:
            return 0
        return self.step.count_fitting_rows(self._leave_to_step(limit))

    def name_longest_row(self, limit: int) -> str:
        """Say how long a single row of a step may be within a number of bytes."""
        length = self.step.find_longest_row(self._leave_to_step(limit))
        if not length or self.kept + self.shortcuts > limit:
            return "not even one row"
        return f"one row of {length:,} tokens"

    def _leave_to_step(self, limit: int) -> float:
        return (limit - self.kept - self.checkpoint) / FRAGMENTS


def check_step(run: Run, model: LanguageModel, free: int | None = None) -> None:
    """Check that memory holds a run's training steps.

    Args:
        run: what will be trained.
        model: its model; its weights are changed.
        free: bytes that may be taken, besides those that the model has; None: what is free.

    Raises:
        DoesNotFitError: naming the rows of a step, the bytes, and the most rows that fit.
    """
    weights = sum(p.nbytes for p in model.parameters())
    bound = weights + (measure_free_memory() if free is None else free)
    found = estimate_closely(partial(estimate, run, model), run.task, bound)
    if found.bytes <= bound:
        return
    raise DoesNotFitError(
        f"batch_size={run.train.batch_size}, seq_len={run.task.seq_len}: does not fit in memory: "
        f"training takes {found}, {format_bytes(bound)} are free; {_advise(run, found, bound)}"
    )


def _advise(run: Run, found: Closest[Footprint], bound: int) -> str:
    """Say how many rows of a step would fit, or how long a single one might be."""
    if found.estimate is None:
        return "shorter rows may fit"
    most = run.train.batch_size - 1
    if found.stopped:  # the larger of two measured steps did not fit
        most = min(most, 2 * count_rows(MANY_TOKENS, run.task.seq_len) - 1)
    rows = min(found.estimate.count_fitting_rows(bound), most)
    return f"{f'batch_size={rows}' if rows else found.estimate.name_longest_row(bound)} would fit"


def count_fitting_lanes(run: Run, most: int, free: int | None = None) -> int:
    """Return how many runs like this one memory holds that compute together, at least 1.

    Args:
        run: one of them; its model is built to be measured.
        most: the answer is at most this.
        free: bytes that they may take; None: what is free.
    """
    found = estimate(run, run.build(), TOKENS)
    bound = measure_free_memory() if free is None else free
    return max((n for n in range(1, most + 1) if found.count_lanes(n) <= bound), default=1)


def estimate(
    run: Run, model: LanguageModel, tokens: int = MANY_TOKENS, limit: float = math.inf
) -> Footprint:
    """Estimate what training a run takes; the model's weights are changed.

    Args:
        run: what will be trained.
        model: its model.
        tokens: of the smaller of two measured steps.
        limit: bytes that a measured step may take.

    Raises:
        OverLimitError: when a measured step takes more.
    """
    step = measure_model(run.task, model, run.train.batch_size, _step, tokens=tokens, limit=limit)
    # In a name: without it, their moments would be freed.
    optimizers = start(model, run.train).optimizers
    with Allocations() as update:
        # A step has left gradients.
        for optimizer in optimizers.values():
            optimizer.step()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.nbytes for p in trained if p.grad is not None)
    model.zero_grad(set_to_none=True)
    weights, moments = sum(p.nbytes for p in model.parameters()), update.live
    scored = count_rows(2**19, run.task.seq_len, most=256) * run.task.seq_len
    return Footprint(
        weights=weights,
        kept=weights + moments + AHEAD * count_tokens_ahead(run.task, run.train.batch_size),
        step=step,
        gradients=gradients,
        update=update.peak - moments,
        rows=run.train.batch_size,
        checkpoint=max(3 * weights, 2 * moments),
        shortcuts=PREDICTORS * scored,
    )


def _step(model: LanguageModel, batch: Batch) -> None:
    """Compute the gradient of a batch."""
    hidden, weight, targets = score(model, batch, "fp32")
    if len(targets):
        linear_cross_entropy(hidden, weight, targets)[0].backward()
