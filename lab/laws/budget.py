"""How much is tried, and at which lengths."""

from dataclasses import dataclass

from torch import nn

from lab.laws.conditions import CONDITIONS, Condition

LENGTHS = (1, 2, 3, 7, 16, 33, 65, 130)
"""One, primes, a power of two, and such as end one after one, or two after two chunks of 32, 64."""
CHUNKS = ("chunk", "block_size", "window")
LONGEST_CHUNK = 256


@dataclass(frozen=True)
class Budget:
    """How much trying may cost.

    Attributes:
        conditions: to bring the target to.
        max_len: tokens after which "stable" is content.
        rounding_len: tokens among which "precision" counts roundings.
        seconds: what a law may take under one condition.
        compiler: torch.compile's backend for "forms agree"; None leaves that law undecided.
    """

    conditions: tuple[Condition, ...] = CONDITIONS
    max_len: int = 65_536
    rounding_len: int = 1024
    seconds: int | float = 5.0
    compiler: str | None = None


QUICK_LENGTHS = (1, 2, 7, 33)
QUICK = Budget(CONDITIONS[:2], max_len=4096, rounding_len=256, seconds=0.3)
"""What five seconds allow."""


def around_chunks(module: nn.Module) -> list[int]:
    """Return lengths around the chunks, blocks and windows that a module's attributes name."""
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
