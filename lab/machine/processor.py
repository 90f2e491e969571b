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
    cores = count_cores()
    return f"{describe_processor()}, {cores} core{'s' * (cores > 1)}, torch {version('torch')}"


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Whether other processes use cores that this one could use."""
    return count_free_cores() < count_cores()


def count_free_cores() -> int:
    """Return how many cores other processes leave to this one, at least 1.

    All threads of the machine that run at this moment are counted, a few times over. Where Linux
    does not tell, all cores are free.
    """
    counts = []
    for _ in range(SAMPLES):
        try:
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        except OSError:
            return count_cores()
        counts.append(int(running) - 1)  # without this thread
        time.sleep(INTERVAL)
    free = (os.cpu_count() or 1) - round(statistics.median(counts))
    return max(1, min(count_cores(), free))
