"""Commands, process and all, against the time that they may take."""

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lab.bench.ratio import Ratio

RUN = "mqar --seq-len 2048 --d-model 64 --max-steps 8 --batch-size 2 --test-rows 4"
"""A run of the paper's length. Its weights are hardly trained, but analyses cost the same."""
BOUNDS = {
    "--help": 0.5,
    "mqar --help": 1.5,
    "mqar --show 3": 3.0,
    "certify torch.nn:GRU --option input_size=16 --option hidden_size=16": 20.0,
    "certify torch.nn:GRU --option input_size=16 --option hidden_size=16 --quick": 5.0,
    "certify lab.layers.attention:Attention --option d_model=64 --option n_heads=2": 20.0,
    "certify lab.layers.ssd:SSD --option d_model=64 --option n_heads=2": 20.0,
}
"""The most CPU seconds that `lab` may take, by its arguments."""
ANALYZE_BOUND = 240.0
STACKS = ("--stack AM*2", "--stack SM_AM", "--stack SE_IE --option I.mask=soft")
"""By stack, whose pairs are parted by "_" here."""


def measure() -> Iterator[Ratio]:
    """Measure each command, and every analysis of a run, in fresh processes.

    CPU seconds, as the time on the clock depends on what else the machine is doing.
    """
    for arguments, bound in BOUNDS.items():
        _count_cpu_seconds(arguments.split())  # reads the modules from disk
        taken = _count_cpu_seconds(arguments.split())
        yield Ratio.of_costs(f"lab {arguments}, against its bound", taken, bound, "CPU s", 1.0)
    for stack in STACKS:
        with tempfile.TemporaryDirectory() as folder:
            run = str(Path(folder) / "run")
            options = [word.replace("_", " ") for word in stack.split()]
            _count_cpu_seconds([*RUN.split(), *options, "--out", run])
            taken = _count_cpu_seconds(["analyze", run])
        name = f"lab analyze, T = 2048, d 64, {' '.join(options)}, against its bound"
        yield Ratio.of_costs(name, taken, ANALYZE_BOUND, "CPU s", 1.0)


def _count_cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "lab", *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
