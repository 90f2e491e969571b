"""How much memory this machine has left; keeping what a process has freed."""

import ctypes
import os
import re
from pathlib import Path


def measure_free_memory() -> int:
    """Return how many bytes a new process can take, those of cached files included."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if found:
        return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""
MOST_KEPT = 2**30
"""Bytes: what is larger goes back to the system when it is freed."""


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    A training step frees what the next one allocates. By default glibc returns much of it to the
    system, which then clears each page anew: 5 to 7 % of a step's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, MOST_KEPT)
    mallopt(M_TRIM_THRESHOLD, 2 * MOST_KEPT - 1)
