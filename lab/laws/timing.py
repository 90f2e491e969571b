"""The clock of the laws' time limits."""

import time

import torch

LEAST = 4
"""Lengths that a law tries however long it takes: the first, of one token, can show no leak."""
LONGER_SHARE = 0.15
"""Share of a law's time that longer lengths may take beside it."""
COMMON, AMPLE = 513, 4
"""Up to this length, which exceeds usual chunks and windows, they may take four times as much."""


def read_clock() -> float:
    """Return the seconds that this process has computed, per thread.

    On a machine that other programs use, waiting would cut a law off before it has tried what it
    is made to try, and a fault would pass for none.
    """
    return time.process_time() / torch.get_num_threads()


class Timer:
    """Decides whether there is time for a further, longer input.

    The processor's time for the same work varies with what else runs on the machine, twofold and
    more. What is found should not vary with it, so the time for common lengths is ample.

    Args:
        seconds: time that the law may take.
    """

    def __init__(self, seconds: float):
        self._seconds, self._length = seconds * LONGER_SHARE, 0
        self._began = self._last = 0.0

    def allows(self, length: int) -> bool:
        """Whether an input of a length should end in time, from what the one before took."""
        now = read_clock()
        if not self._length:
            self._began = self._last = now
        expected = (now - self._last) * (length / max(self._length, 1)) ** 2
        self._last, self._length = now, length
        seconds = self._seconds * (AMPLE if length <= COMMON else 1)
        return now + expected - self._began <= seconds
