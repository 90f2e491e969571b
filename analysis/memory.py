"""How much memory looking at rows takes, so that what cannot fit is said before it begins."""

import math
import os

from torch import nn

from lab.layers.mixer import MatrixMixer, offers_rows
from lab.models import LanguageModel

BLOCK_ENTRIES = 2**22
"""Entries of a matrix that are in memory at once, where a mixer can give a few of its rows."""
FLOAT = 4
"""Bytes of a number."""
STREAMS = 24
"""Copies of the residual stream that a forward pass with a few hooks holds, beside one a block."""
COPIES = 6
"""Copies of a matrix's block, while it is measured."""


def estimate_memory(model: LanguageModel, rows: int, seq_len: int) -> int:
    """Return about how many bytes an analysis of rows of this length takes.

    Activations grow with rows · T · d. Matrices are met by blocks of rows, unless a mixer that is
    not the lab's own can only give a whole one: T² a head. What Python and torch take by themselves
    comes on top.
    """
    width = max(model.embed.embedding_dim, *(_widest(block) for block in model.blocks))
    activations = rows * seq_len * width * (STREAMS + len(model.blocks))
    entries = max(BLOCK_ENTRIES, *(_entries(block, seq_len) for block in model.blocks))
    return FLOAT * (activations + COPIES * entries)


def measure_free_memory() -> int:
    """Return how many bytes of memory are free on this machine."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(model: LanguageModel, rows: int, seq_len: int, limit: int | None = None) -> None:
    """Hold what an analysis takes to a limit, bytes; None: what is free.

    Raises:
        ValueError: naming what is needed, the limit, and how many rows would fit.
    """
    bound = measure_free_memory() if limit is None else limit
    asked = estimate_memory(model, rows, seq_len)
    if asked <= bound:
        return
    one = estimate_memory(model, 1, seq_len)
    fit = math.floor((bound - one) / max(1, estimate_memory(model, 2, seq_len) - one)) + 1
    advice = f"{fit:,} rows would fit" if fit >= 1 else "not even one row fits"
    raise ValueError(
        f"rows={rows} of {seq_len:,} tokens take about {_size(asked)}, must be ≤ {_size(bound)} "
        f"({'free memory' if limit is None else 'memory'}); {advice}"
    )


def _widest(block: nn.Module) -> int:
    """Return the widest output of a block's linear maps."""
    return max((m.out_features for m in block.modules() if isinstance(m, nn.Linear)), default=1)


def _entries(block: nn.Module, seq_len: int) -> int:
    """Return the entries of the whole matrices that a block's mixer can only give at once."""
    mixer = block.mixer
    if not isinstance(mixer, MatrixMixer) or offers_rows(mixer):
        return 0
    return seq_len**2


def _size(count: int) -> str:
    """Return bytes in the unit that reads best."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:,.3g} TiB"
