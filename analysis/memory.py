"""Estimate the memory of analyses, to refuse what cannot fit before it begins.

    a forward pass over all rows, with the input of each mixer, in proportion to the rows
    blocks of logits, and a block of a matrix, each copied while it is measured
    or the matrices of all layers multiplied, T² entries each, up to `LONGEST_ROLLED` tokens

The pass is measured on a few rows, so the estimate holds for mixers of the user, too. The memory of
Python and torch themselves is not included.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.mixer import MatrixMixer, offers_rows
from lab.machine.growth import Demand
from lab.machine.memory import format_bytes, measure_free_memory
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.models.memory import measure_model
from lab.ops.cross_entropy import BLOCK_BYTES
from tasks.base import Batch, Task

BLOCK_ENTRIES = 2**22
"""Entries of a matrix that are in memory at once, if the mixer can return some of its rows."""
FLOAT = 4
"""Bytes per number."""
COPIES = 6
"""Copies of a block of a matrix, or of logits, while it is measured."""
LONGEST_ROLLED = 4096
"""Maximum number of tokens of a row of which the layers' matrices are multiplied: that costs T³."""
ROLLED = 16
"""Matrices of T² entries in memory while layers are multiplied; measured at 2,048 tokens."""


def estimate_memory(
    model: LanguageModel, task: Task, rows: int, only: Sequence[str] | None = None
) -> Demand:
    """Estimate what analyses of some rows of a task take.

    Matrices are read by blocks of rows, unless a mixer can only return a whole one: T² entries.

    Args:
        model: what is analysed.
        task: whose rows are.
        rows: of the batch.
        only: names of the analyses; None: all.
    """
    growth = measure_model(task, model, max(rows, 1), _pass_forward)
    largest = task.seq_len**2 * model.embed.embedding_dim  # with as many heads as there can be
    matrices = max(_count_entries(block, task.seq_len) for block in model.blocks)
    entries = max(min(largest, BLOCK_ENTRIES), matrices)
    wanted = not only or "rollout" in only
    rolled = task.seq_len**2 if wanted and _is_rolled_out(model, task.seq_len) else 0
    fixed = max(COPIES * (FLOAT * entries + BLOCK_BYTES), ROLLED * FLOAT * rolled)
    return Demand(fixed, rows, growth)


def check_memory(
    model: LanguageModel,
    task: Task,
    rows: int,
    limit: int | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Check that analyses fit into memory.

    Args:
        model: what is analysed.
        task: whose rows are.
        rows: of the batch.
        limit: bytes; None: all that are free.
        only: names of the analyses; None: all.

    Raises:
        ValueError: naming the memory needed, the limit, and how many rows would fit.
    """
    bound = measure_free_memory() if limit is None else limit
    found = estimate_memory(model, task, rows, only)
    if found.total <= bound:
        return
    fit = found.count_fitting_rows(bound + 1)  # a part of a byte was cut off
    advice = f"{fit:,} rows would fit" if fit >= 1 else "not even one row fits"
    size, most = format_bytes(found.total), format_bytes(bound)
    raise ValueError(
        f"rows={rows} of {task.seq_len:,} tokens take about {size}, must be ≤ {most} "
        f"({'free memory' if limit is None else 'memory'}); {advice}"
    )


@torch.no_grad()
def _pass_forward(model: LanguageModel, batch: Batch) -> None:
    """Run a model as analyses do: with the input of each mixer kept."""
    kept = []

    def keep(residual: Tensor, point: HookPoint) -> None:
        kept.append(residual.clone())

    with model.hooks([(lambda name: name.endswith("hook_resid_pre"), keep)]):
        score(model, batch, "fp32")


def _is_rolled_out(model: LanguageModel, seq_len: int) -> bool:
    """Whether the matrices of all layers are multiplied, which every mixer must offer."""
    mixers = [block.mixer for block in model.blocks if block.mixer is not None]
    offered = [isinstance(mixer, MatrixMixer) for mixer in mixers]
    return seq_len <= LONGEST_ROLLED and bool(offered) and all(offered)


def _count_entries(block: nn.Module, seq_len: int) -> int:
    """Count the entries of a block's matrix if its mixer can only return the whole."""
    mixer = block.mixer
    if not isinstance(mixer, MatrixMixer) or offers_rows(mixer):
        return 0
    return seq_len**2
