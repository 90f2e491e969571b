"""How much memory this process may still take; keeping what it has freed."""

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and which entry of memory.stat counts cached files: versions 2 and 1."""


class DoesNotFitError(ValueError):
    """Memory has no room for what was asked; the message has the numbers."""


def measure_free_memory() -> int:
    """Return how many bytes this process can still take, those of cached files included.

    It is the least of what the machine has, what the control groups of this process allow (as of a
    container), and what its own limit on data allows (`ulimit -d`). Where the system does not tell
    what is free, as macOS does not, all that the machine has counts as free.
    """
    return max(0, min([_measure_machine(), *_measure_groups(), *_measure_own_limit()]))


def format_bytes(count: float) -> str:
    """Format a number of bytes in the largest unit that fits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _measure_machine() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    if found:
        return int(found[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _measure_groups() -> Iterator[int]:
    """Yield the bytes left in each control group that this process is in and that has a limit."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = CGROUPS / "memory" if kinds else CGROUPS
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _measure_group(folder)


def _measure_group(folder: Path) -> Iterator[int]:
    for limit, used, cached in CGROUP_FILES:
        most, now = _read(folder / limit).strip(), _read(folder / used).strip()
        if most.isdecimal() and now.isdecimal():
            kept = re.search(rf"^{cached} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
            yield int(most) - int(now) + (int(kept[1]) if kept else 0)


def _measure_own_limit() -> Iterator[int]:
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    taken = re.search(r"VmData:\s+(\d+) kB", _read(Path("/proc/self/status")))
    if most != resource.RLIM_INFINITY and taken:
        yield most - int(taken[1]) * 1024


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""
MOST_KEPT, MOST_FREE = 2**25, 2**31 - 1
"""Bytes: a larger tensor goes back to the system when it is freed, as does what is free beyond.
Kept, large tensors leave gaps that no other fits into (LOG.md)."""


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
    mallopt(M_TRIM_THRESHOLD, MOST_FREE)


def give_back_freed_memory() -> None:
    """Give the system what this process has freed and kept, where the C library is glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
