"""Which processor this is, and whether other processes keep it busy."""

import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path

SAMPLES, INTERVAL = 5, 0.01
"""How often, and how many seconds apart, running threads are counted."""


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


def describe_machine() -> str:
    """Return all that the speed of training on this CPU depends on, apart from the run."""
    return f"{describe_processor()}, {count_cores()} cores, torch {version('torch')}"


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Whether other processes use cores that this one could use; False where Linux does not tell.

    All threads of the machine that run at this moment are counted, a few times over.
    """
    counts = []
    for _ in range(SAMPLES):
        try:
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        except OSError:
            return False
        counts.append(int(running) - 1)  # this thread reads
        time.sleep(INTERVAL)
    return (os.cpu_count() or 1) - statistics.median(counts) < count_cores()
