"""Whether memory holds an analysis, by arithmetic, before it begins.

    a forward pass over all rows, with the input of each mixer
    or a block of a matrix, copied while it is measured
    or the matrices of all layers multiplied, up to `LONGEST_ROLLED` tokens

A mixer of the user may take more; then torch says so.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lab.layers.mixer import MatrixMixer, Mixer
from lab.machine import FLOAT, format_bytes, measure_free_memory
from lab.models import LanguageModel
from tasks.base import Task

BLOCK_ENTRIES = 2**22
"""Entries of a matrix that are in memory at once, if the mixer can return some of its rows."""
COPIES = 6
"""Copies of a block of a matrix while it is measured."""
PASSED = 40
"""Numbers that a forward pass makes of a token, as a multiple of its width."""
LONGEST_ROLLED = 4096
"""Maximum number of tokens of a row of which the layers' matrices are multiplied: that costs T³."""
ROLLED = 16
"""Matrices of T² entries in memory while layers are multiplied; measured at 2,048 tokens."""


def estimate_memory(
    model: LanguageModel, task: Task, only: Sequence[str] | None = None
) -> tuple[int, int]:
    """Return the bytes that analyses take whatever the rows, and those of each row.

    Matrices are read by blocks of rows, unless a mixer can only return a whole one: T² entries.

    Args:
        model: whose analyses they are.
        task: whose rows are.
        only: names of the analyses; None: all.
    """
    blocks, d_model = model.list_blocks(), model.cfg.d_model
    token = model.embed.weight.new_zeros(1, 1, d_model)
    block = max(_count_entries(each.mixer, token, task.seq_len) for each in blocks)
    fixed = FLOAT * COPIES * block
    if (not only or "rollout" in only) and _is_rolled_out(model, task.seq_len):
        fixed = max(fixed, FLOAT * ROLLED * task.seq_len**2)
    return fixed, FLOAT * task.seq_len * d_model * (len(blocks) + PASSED)


def check_memory(
    model: LanguageModel,
    task: Task,
    rows: int,
    limit: int | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Check that analyses of some rows of a task fit into memory.

    Args:
        model: whose analyses they are.
        task: whose rows are.
        rows: of the batch.
        limit: bytes; None: all that are free.
        only: names of the analyses; None: all.

    Raises:
        ValueError: naming the memory needed, the limit, and how many rows would fit.
    """
    bound = measure_free_memory() if limit is None else limit
    fixed, each = estimate_memory(model, task, only)
    total = fixed + rows * each
    if total <= bound:
        return
    fit = max(0, (bound - fixed) // each)
    advice = f"{fit:,} row{'s' * (fit > 1)} would fit" if fit else "not even one row fits"
    raise ValueError(
        f"rows={rows} of {task.seq_len:,} tokens take about {format_bytes(total)}, must be ≤ "
        f"{format_bytes(bound)} ({'free memory' if limit is None else 'memory'}); {advice}"
    )


def _is_rolled_out(model: LanguageModel, seq_len: int) -> bool:
    """Whether the matrices of all layers are multiplied, which every mixer must offer."""
    mixers = [block.mixer for block in model.blocks if block.mixer is not None]
    offered = [isinstance(mixer, MatrixMixer) for mixer in mixers]
    return seq_len <= LONGEST_ROLLED and bool(offered) and all(offered)


def _count_entries(mixer: Mixer | None, token: Tensor, seq_len: int) -> int:
    """Count the entries of a mixer's matrix that are in memory at once; 0 if it offers none."""
    if not isinstance(mixer, MatrixMixer):
        return 0
    entries = _count_heads(mixer, token) * seq_len**2
    return min(entries, BLOCK_ENTRIES) if mixer.takes_rows else entries


@torch.no_grad()
def _count_heads(mixer: MatrixMixer, token: Float[Tensor, "1 1 d"]) -> int:
    """Count the heads of a mixer; as many as channels if a user's refuses one token."""
    try:
        return mixer.values(token).shape[1]
    except Exception:
        return token.shape[-1]
