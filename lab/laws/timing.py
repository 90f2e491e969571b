"""The clock of the laws' time limits."""

import time

import torch

LEAST = 4
"""Lengths that a law tries however long it takes: the first, of one token, can show no leak."""


def read_clock() -> float:
    """Return the seconds that this process has computed, per thread.

    On a machine that other programs use, waiting would cut a law off before it has tried what it
    is made to try, and a fault would pass for none.
    """
    return time.process_time() / torch.get_num_threads()
