"""Estimate the memory of an analysis, to refuse what cannot fit before it begins.

    a forward pass over all rows, with the input of each mixer, in proportion to the rows
    blocks of logits, and a block of a matrix, each copied while it is measured

The pass is measured on a few rows, so the estimate holds for mixers of the user, too. The memory of
Python and torch themselves is not included.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.mask import has_oracle_mask
from lab.layers.mixer import MatrixMixer, offers_rows
from lab.machine.allocation import measure_peak
from lab.machine.memory import format_bytes, measure_free_memory
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.cross_entropy import BLOCK_BYTES
from tasks.base import Batch, Task, count_rows

BLOCK_ENTRIES = 2**22
"""Entries of a matrix that are in memory at once, if the mixer can return some of its rows."""
FLOAT = 4
"""Bytes per number."""
COPIES = 6
"""Copies of a block of a matrix, or of logits, while it is measured."""
TOKENS = 2**10
"""Tokens of the pass that is measured, about."""
FRAGMENTS = 1.35
"""Bytes a process takes for each byte of activations, as in training."""


def estimate_memory(model: LanguageModel, task: Task, rows: int) -> int:
    """Estimate how many bytes an analysis of some rows of a task takes.

    Matrices are read by blocks of rows, unless a mixer can only return a whole one: T² entries.
    """
    return _add_matrices(model, task, rows, _measure_row(model, task, rows))


def check_memory(model: LanguageModel, task: Task, rows: int, limit: int | None = None) -> None:
    """Check that an analysis fits into memory.

    Args:
        model: what is analysed.
        task: whose rows are.
        rows: of the batch.
        limit: bytes; None: all that are free.

    Raises:
        ValueError: naming the memory needed, the limit, and how many rows would fit.
    """
    bound = measure_free_memory() if limit is None else limit
    a_row = _measure_row(model, task, rows)
    asked = _add_matrices(model, task, rows, a_row)
    if asked <= bound:
        return
    left = bound - _add_matrices(model, task, 0, a_row) + 1  # a part of a byte was cut off
    fit = math.floor(left / max(1.0, FRAGMENTS * a_row))
    advice = f"{fit:,} rows would fit" if fit >= 1 else "not even one row fits"
    size, most = format_bytes(asked), format_bytes(bound)
    raise ValueError(
        f"rows={rows} of {task.seq_len:,} tokens take about {size}, must be ≤ {most} "
        f"({'free memory' if limit is None else 'memory'}); {advice}"
    )


def _add_matrices(model: LanguageModel, task: Task, rows: int, a_row: float) -> int:
    largest = task.seq_len**2 * model.embed.embedding_dim  # with as many heads as there can be
    whole = max(_count_entries(block, task.seq_len) for block in model.blocks)
    entries = max(min(largest, BLOCK_ENTRIES), whole)
    return int(FRAGMENTS * rows * a_row) + COPIES * (FLOAT * entries + BLOCK_BYTES)


def _measure_row(model: LanguageModel, task: Task, rows: int) -> float:
    """Return the bytes that a forward pass takes for each row."""
    length = task.seq_len
    some = count_rows(TOKENS, length, most=max(rows, 1))
    batch = task.batch(size=some)
    if length <= 2 * TOKENS or has_oracle_mask(model):  # which is told where whole rows have pairs
        return measure_peak(lambda: _pass_forward(model, batch)) / some
    lengths = (TOKENS // 2, TOKENS, 2 * TOKENS)
    found = [measure_peak(lambda n=n: _pass_forward(model, batch.cut(n))) for n in lengths]
    square, line, _ = np.polyfit(lengths, found, 2)
    return max(0.0, square) * length**2 + max(found[-1] / lengths[-1], line) * length


@torch.no_grad()
def _pass_forward(model: LanguageModel, batch: Batch) -> None:
    """Run a model as analyses do: with the input of each mixer kept."""
    kept = []

    def keep(residual: Tensor, point: HookPoint) -> None:
        kept.append(residual.clone())

    with model.hooks([(lambda name: name.endswith("hook_resid_pre"), keep)]):
        score(model, batch, "fp32")


def _count_entries(block: nn.Module, seq_len: int) -> int:
    """Count the entries of a block's matrix if its mixer can only return the whole."""
    mixer = block.mixer
    if not isinstance(mixer, MatrixMixer) or offers_rows(mixer):
        return 0
    return seq_len**2
