"""This machine: its devices, its processor, and its memory."""

import ctypes
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tasks.near_names import list_choices

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of a container."""
NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "Cannot allocate memory")
"""What torch says in its RuntimeErrors where memory does not suffice."""
FLOAT = 4
"""Bytes per number."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""
MOST_KEPT, MOST_FREE = 2**25, 2**31 - 1
"""Bytes: a larger tensor goes back to the system when it is freed, as does what is free beyond.
Kept, large tensors leave gaps that no other fits into (LOG.md)."""


class DoesNotFitError(ValueError):
    """Memory has no room for what was asked; the message has the numbers."""


def choose_device(name: str) -> "torch.device":
    """Return the device that a user names; "auto" means CUDA if there is any, else the CPU.

    Raises:
        ValueError: for an unknown name, or a device that this machine does not have.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name}: {list_choices(name, ('auto', 'cpu', 'cuda', 'cuda:N'))}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name}: this machine has no CUDA device; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"device={name}: this machine has cuda:0 to cuda:{last}")
    return device


def describe_device(device: "torch.device") -> str:
    """Return all that the speed of training on a device depends on, apart from the run."""
    if device.type == "cpu":
        return describe_machine()
    import torch

    return f"{torch.cuda.get_device_name(device)}, {describe_machine()}"


def describe_machine() -> str:
    """Return all that the speed of training on this CPU depends on, apart from the run."""
    cores = count_cores()
    return f"{describe_processor()}, {cores} core{'s' * (cores > 1)}, torch {version('torch')}"


def describe_processor() -> str:
    """Return the processor's name and its bf16 features, which one name may differ in."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    features = [word for line in lines if line.startswith("flags") for word in line.split()]
    kinds = sorted({word for word in features if "bf16" in word or word.startswith("amx")})
    return " ".join([names[0] if names else name, *kinds])


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads of the CPU, for a `with` block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_free_memory() -> int:
    """Return how many bytes this process can still take, those of cached files included.

    It is the least of what the machine has, what a container allows, and `ulimit -d`.
    """
    free, taken = psutil.virtual_memory().available, psutil.Process().memory_info()
    with suppress(OSError, ValueError):  # no container, or no limit ("max")
        limit, used = ((CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        stat = (CGROUP / "memory.stat").read_text().split()
        cached = int(stat[stat.index("inactive_file") + 1])
        free = min(free, int(limit) - int(used) + cached)
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        free = min(free, most - getattr(taken, "data", 0))
    return max(0, free)


def format_bytes(count: float) -> str:
    """Format a number of bytes in the largest unit that fits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def check_fits(what: str, numbers: float) -> None:
    """Check that free memory holds some numbers of 4 bytes.

    Linux gives a process more than there is, and kills it when it writes to it.

    Raises:
        DoesNotFitError: naming what is asked, its bytes, and those that are free.
    """
    free = measure_free_memory()
    if FLOAT * numbers > free:
        raise DoesNotFitError(
            f"{what}: does not fit in memory: takes at least {format_bytes(FLOAT * numbers)}, "
            f"{format_bytes(free)} are free"
        )


@contextmanager
def explain_lack_of_memory(what: str) -> Iterator[None]:
    """Say in one sentence, in place of torch's or Python's error, that memory did not suffice.

    Raises:
        DoesNotFitError: naming what was done, and the free memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(w in str(error) for w in NO_MEMORY):
            raise
        raise DoesNotFitError(
            f"{what}: does not fit in memory, of which {format_bytes(measure_free_memory())} are "
            "free; choose smaller sizes, or fewer rows at a time"
        ) from error


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
