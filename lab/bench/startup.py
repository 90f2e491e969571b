"""How long `lab --help` keeps a user waiting."""

import subprocess
import sys
import time
from statistics import median

from lab.bench.ratio import Ratio

BOUND_MS = 500.0


def startup(repeats: int = 7) -> list[Ratio]:
    """Time `lab --help` in a fresh process against the promised 500 ms."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "lab.cli", "--help"], check=True, capture_output=True)
        times.append(1000 * (time.perf_counter() - began))
    taken = median(times[1:])
    return [Ratio("lab --help, against its bound", taken, BOUND_MS, "ms", BOUND_MS / taken, 1.0)]
