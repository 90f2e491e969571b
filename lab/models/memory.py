"""Whether memory holds a model's weights, counted while they are made, and its evaluation."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from lab.config import ModelConfig
from lab.layers.mask import has_oracle_mask
from lab.machine.allocation import Allocations, OverLimitError
from lab.machine.growth import (
    MANY_TOKENS,
    TOKENS,
    Demand,
    Growth,
    check_demand,
    measure_growth,
)
from lab.machine.memory import DoesNotFitError, format_bytes, measure_free_memory
from lab.models.architectures import build
from lab.models.evaluation import evaluate_batch
from lab.models.language_model import LanguageModel
from tasks.base import Batch, Task

FLOAT = 4
"""Bytes per number."""
SIZES = ("d_model", "vocab_size")
"""What the number of weights mostly depends on."""


@contextmanager
def refuse_weights(config: ModelConfig, vocab_size: int, *, copies: int = 1) -> Iterator[None]:
    """Refuse weights that memory does not hold while a model is built in a `with` block.

    Args:
        config: of the model.
        vocab_size: rows of its embedding table.
        copies: numbers for each weight: itself and, where it is trained, its gradient and moments.

    Raises:
        DoesNotFitError: naming the sizes, the bytes, and the largest sizes that fit.
    """
    free = measure_free_memory()
    least = FLOAT * (vocab_size + len(config.stack.split()) * config.d_model) * config.d_model
    # Counting them first takes seconds, so it is done only where making them would take longer.
    if least * copies > free / 16 and count_bytes(config, vocab_size, copies) > free:
        raise DoesNotFitError(_explain(config, vocab_size, copies, free))
    try:
        with Allocations(free / copies):
            yield
    except (OverLimitError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise DoesNotFitError(_explain(config, vocab_size, copies, free)) from error


def _explain(config: ModelConfig, vocab_size: int, copies: int, free: int) -> str:
    found = {name: _find_largest(config, vocab_size, name, copies, free) for name in SIZES}
    fits = " or ".join(f"{name}={value}" for name, value in found.items() if value)
    parts = "weights, gradients and moments" if copies > 1 else "the weights"
    asked = format_bytes(count_bytes(config, vocab_size, copies))
    return (
        f"d_model={config.d_model}, vocab_size={vocab_size}, {config.stack}: does not fit in "
        f"memory: {parts} take {asked}, {format_bytes(free)} are free; "
        f"{fits or 'neither a smaller width nor fewer tokens'} would fit"
    )


def count_bytes(config: ModelConfig, vocab_size: int, copies: int = 1) -> int:
    """Return the bytes of a model's weights, and of what belongs to those that are trained.

    Raises:
        ValueError: for a model that cannot be built.
    """
    with torch.device("meta"):  # slow to import, so used only to explain a refusal
        model = build(**config.to_dict(), vocab_size=vocab_size)
    return FLOAT * sum(p.numel() * (copies if p.requires_grad else 1) for p in model.parameters())


def _find_largest(config: ModelConfig, vocab_size: int, name: str, copies: int, free: int) -> int:
    """Return the largest value of a size that fits, with the other as it is; 0 for none."""
    unit = config.n_heads if name == "d_model" else 1
    low, high = 0, (config.d_model if name == "d_model" else vocab_size) // unit
    while high - low > 1:
        middle = (low + high) // 2
        try:
            if name == "d_model":
                smaller = replace(config, d_model=middle * unit)
                fits = count_bytes(smaller, vocab_size, copies) <= free
            else:
                fits = count_bytes(config, middle, copies) <= free
        except ValueError:  # layers cannot have this width
            fits = False
        low, high = (middle, high) if fits else (low, middle)
    return low * unit


def measure_model(
    task: Task,
    model: LanguageModel,
    rows: int,
    call: Callable[[LanguageModel, Batch], object],
    *,
    tokens: int = TOKENS,
    limit: float = math.inf,
) -> Growth:
    """Measure what a model's work on a batch takes on few rows of a task, as `measure_growth`.

    An oracle mask is told where whole rows have pairs, so for such a model no row is cut.

    Raises:
        OverLimitError: when a measured call takes more than the limit.
    """
    whole = has_oracle_mask(model)
    return measure_growth(task, rows, partial(call, model), tokens=tokens, limit=limit, whole=whole)


def estimate_evaluation(
    task: Task,
    model: LanguageModel,
    rows: int,
    tokens: int = MANY_TOKENS,
    limit: float = math.inf,
) -> Demand:
    """Estimate what an evaluation takes beside the model.

    Args:
        task: what rows are of.
        model: in evaluation mode.
        rows: evaluated at a time.
        tokens: of the smaller of two measured passes.
        limit: bytes that a measured pass may take.

    Raises:
        OverLimitError: when a measured pass takes more than the limit.
    """
    growth = measure_model(task, model, rows, evaluate_batch, tokens=tokens, limit=limit)
    return Demand(0, rows, growth)


def check_evaluation(task: Task, model: LanguageModel, rows: int, free: int | None = None) -> None:
    """Check that memory holds an evaluation beside the model.

    Args:
        task: what rows are of.
        model: in evaluation mode.
        rows: evaluated at a time.
        free: bytes that may be taken; None: what is free.

    Raises:
        DoesNotFitError: naming the row length, the bytes, and the longest row that fits.
    """
    check_demand("an evaluation", task, partial(estimate_evaluation, task, model, rows), free)
