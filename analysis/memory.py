"""Estimate the memory of an analysis, to refuse what cannot fit before it begins."""

import math

from torch import nn

from lab.layers.mixer import MatrixMixer, offers_rows
from lab.machine.memory import format_bytes, measure_free_memory
from lab.models import LanguageModel

BLOCK_ENTRIES = 2**22
"""Entries of a matrix that are in memory at once, if the mixer can return some of its rows."""
FLOAT = 4
"""Bytes per number."""
STREAMS = 24
"""Copies of the residual stream that a forward pass with hooks holds, besides one per block."""
COPIES = 6
"""Copies of a block of a matrix while it is measured."""


def estimate_memory(model: LanguageModel, rows: int, seq_len: int) -> int:
    """Estimate how many bytes an analysis of rows of this length takes.

    Activations grow with rows · T · d. Matrices are read by blocks of rows, unless a mixer can only
    return a whole one: T² entries. The memory of Python and torch themselves is not included.
    """
    width = max(model.embed.embedding_dim, *(_find_width(block) for block in model.blocks))
    activations = rows * seq_len * width * (STREAMS + len(model.blocks))
    entries = max(BLOCK_ENTRIES, *(_count_entries(block, seq_len) for block in model.blocks))
    return FLOAT * (activations + COPIES * entries)


def check_memory(model: LanguageModel, rows: int, seq_len: int, limit: int | None = None) -> None:
    """Check that an analysis fits into memory.

    Args:
        model: what is analysed.
        rows: of the batch.
        seq_len: tokens per row.
        limit: bytes; None: all that are free.

    Raises:
        ValueError: naming the memory needed, the limit, and how many rows would fit.
    """
    bound = measure_free_memory() if limit is None else limit
    asked = estimate_memory(model, rows, seq_len)
    if asked <= bound:
        return
    one = estimate_memory(model, 1, seq_len)
    fit = math.floor((bound - one) / max(1, estimate_memory(model, 2, seq_len) - one)) + 1
    advice = f"{fit:,} rows would fit" if fit >= 1 else "not even one row fits"
    size, most = format_bytes(asked), format_bytes(bound)
    raise ValueError(
        f"rows={rows} of {seq_len:,} tokens take about {size}, must be ≤ {most} "
        f"({'free memory' if limit is None else 'memory'}); {advice}"
    )


def _find_width(block: nn.Module) -> int:
    """Return the width of a block's widest linear map."""
    return max((m.out_features for m in block.modules() if isinstance(m, nn.Linear)), default=1)


def _count_entries(block: nn.Module, seq_len: int) -> int:
    """Count the entries of a block's matrix if its mixer can only return the whole."""
    mixer = block.mixer
    if not isinstance(mixer, MatrixMixer) or offers_rows(mixer):
        return 0
    return seq_len**2
