"""Eight runs that differ in the seed, at once, against the same runs one after another.

The first line is what a user gets: `lab mqar --seeds 8`, which is a process for each core, against
eight commands `lab mqar --seed N`, with as many threads as each finds fastest. Wall time, so it
wants a machine with nothing beside; the note has CPU seconds. The other lines are the gradients of
eight lanes in one process on one thread, together against one after another, in CPU time.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from lab.bench.ratio import Ratio, take_turns
from lab.models import build
from lab.training.gradients import differentiate, differentiate_lanes
from lab.training.lane_time import drop_gradients
from lab.training.step_time import use_threads
from tasks.mqar import MQAR

LANES, STEPS = 8, 200
TARGET = 2.0
MAIN_JOB = ("--seq-len", "64", "--vocab-size", "256", "--max-steps", str(STEPS), "--no-early-stop")
SETTINGS = (
    ("AM*2", 64, 256, 64),
    ("AM*2", 64, 256, 8),
    ("AM*2", 8, 64, 8),
    ("SM*2", 64, 256, 8),
    ("SE IE", 64, 256, 8),
)
"""(stack, seq_len, vocab_size, rows a step); the first is the main job's."""
REPEATS = 5


def measure() -> list[Ratio]:
    """Measure the main job as commands, and a step of lanes at several sizes."""
    return [compare_commands(MAIN_JOB), *(_compare_steps(*setting) for setting in SETTINGS)]


def compare_commands(words: Sequence[str]) -> Ratio:
    """Measure one command for eight seeds against a command for each."""
    before = os.getloadavg()[0]
    with TemporaryDirectory() as folder:
        out = Path(folder)
        alone = [[*words, "--seed", str(n), "--out", str(out / str(n))] for n in range(LANES)]
        theirs, their_cpu = _run(alone)
        ours, our_cpu = _run([[*words, "--seeds", str(LANES), "--out", str(out / "seeds")]])
    return Ratio.of_costs(
        f"lab mqar --seeds {LANES}, {STEPS} steps, against {LANES} commands one after another",
        ours,
        theirs,
        "s",
        TARGET,
        f"{our_cpu:.0f} against {their_cpu:.0f} CPU seconds; load {before:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after",
    )


def _run(commands: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Return the seconds of some commands of `lab mqar`, and the CPU seconds of their processes."""
    wall, cpu = time.perf_counter(), _count_cpu_seconds()
    for words in commands:
        command = [sys.executable, "-P", "-m", "lab", "mqar", *words]
        subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - wall, _count_cpu_seconds() - cpu


def _count_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _compare_steps(stack: str, seq_len: int, vocab_size: int, rows: int) -> Ratio:
    task = MQAR(seq_len=seq_len, vocab_size=vocab_size)
    models = [build(stack, vocab_size=vocab_size, d_model=64, seed=z) for z in range(LANES)]
    batches = [task.batch(size=rows, seed=z) for z in range(LANES)]

    def compute_apart() -> None:
        for model, batch in zip(models, batches, strict=True):
            differentiate(model, batch, "fp32")

    calls = (lambda: differentiate_lanes(models, batches, "fp32"), compute_apart)
    with use_threads(1):
        times = take_turns(calls, REPEATS + 1, time.process_time, partial(drop_gradients, models))
    ours, theirs = (taken[1:] for taken in times)  # the first call warms up
    ratios = sorted(apart / together for together, apart in zip(ours, theirs, strict=True))
    low, _, high = quantiles(ratios, n=4)
    return Ratio(
        f"{stack}, gradients of {LANES} lanes, T={seq_len}, V={vocab_size}, {rows} rows",
        1e3 * median(ours) / LANES,
        1e3 * median(theirs) / LANES,
        "ms of CPU a lane",
        median(ratios),
        None,
        f"quartiles {low:.2f} to {high:.2f}",
    )
