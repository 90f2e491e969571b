"""The sequence lengths that probes have by default."""

from torch import nn

LENGTHS = (1, 2, 3, 7, 16, 33, 65, 130)
"""One, primes, a power of two, and lengths that exceed chunks of 32 or 64 by one or two tokens."""
CHUNKS = ("chunk", "block_size", "window")
LONGEST_CHUNK = 256


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
