"""How much computing it takes until a command answers."""

import resource
import subprocess
import sys
from statistics import median

from lab.bench.ratio import Ratio

BOUNDS = {"--help": 0.3, "mqar --help": 0.8, "mqar --show 3": 3.0}
"""The most CPU seconds that `lab` may take, by its arguments."""


def measure(repeats: int = 5) -> list[Ratio]:
    """Measure each command of `BOUNDS` in fresh processes against its bound.

    CPU seconds, as the time on the clock depends on what else the machine is doing.
    """
    found = []
    for arguments, bound in BOUNDS.items():
        command = [sys.executable, "-m", "lab", *arguments.split()]
        # The first run reads the modules from disk, and is not counted.
        taken = median([_cpu_seconds(command) for _ in range(repeats + 1)][1:])
        name = f"lab {arguments}, against its bound"
        found.append(Ratio.of_costs(name, taken, bound, "CPU s", 1.0))
    return found


def _cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
