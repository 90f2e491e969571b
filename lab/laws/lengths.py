"""The sequence lengths that probes have by default."""

from collections.abc import Iterator
from typing import Any

from torch import nn

LENGTHS = (1, 2, 3, 7, 16, 33, 65, 130)
"""One, primes, a power of two, and lengths that exceed chunks of 32 or 64 by one or two tokens."""
LONGER, MULTIPLES = (48, 128, 257, 513, 1025, 2049, 4097), (96, 192, 256, 384)
"""Lengths that are tried with fewer trials while there is time: sizes of chunks, lengths beyond
caches and tables of common sizes, and then further multiples of chunks."""
CHUNKS = ("chunk", "block_size", "window")
LONGEST_CHUNK = 256
LONGEST = 8193
"""Largest size around which lengths are tried."""
MOST_NAMED = 12


def find_lengths_around_chunks(module: nn.Module) -> list[int]:
    """Return lengths just above one and two chunks, blocks or windows that attributes name."""
    sizes = {
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if type(value) is int and any(word in name for word in CHUNKS)
    }
    return sorted(
        {
            length
            for size in sizes
            if 1 < size <= LONGEST_CHUNK
            for length in (size + 1, 2 * size + 1)
        }
    )


def find_longer_lengths(module: nn.Module) -> list[int]:
    """Return lengths above `LENGTHS`, and those at and above sizes that the module names.

    These are whole numbers among its attributes and those of its configuration, and the shapes of
    its buffers, for example of a mask. Of many sizes the smallest are taken.
    """
    named = sorted({size for size in _list_sizes(module) if LENGTHS[-2] < size < LONGEST})
    named = named[:MOST_NAMED]
    first, second = sorted({*LONGER, *(n + 1 for n in named)}), sorted({*MULTIPLES, *named})
    return [n for n in dict.fromkeys((*first, *second)) if n not in LENGTHS]


def _list_sizes(module: nn.Module) -> Iterator[int]:
    for part in module.modules():
        for owner in (part, *(getattr(part, name, None) for name in ("config", "cfg", "args"))):
            fields: dict[str, Any] = owner if isinstance(owner, dict) else vars(owner or object)
            yield from (v for v in dict(fields).values() if type(v) is int)
        for buffer in part.buffers(recurse=False):
            yield from buffer.shape
