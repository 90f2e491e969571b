"""How long OpenMP's threads wait in a loop for the next work before they sleep.

A thread that spins is there at once, but it takes the time of whoever else wants its core. GNU's
OpenMP, which torch's wheels for Linux bring, reads `GOMP_SPINCOUNT` when torch is imported, so it
has to be set before. Which setting is faster differs from machine to machine by a factor of up to
1.5 either way (LOG.md), so it is measured, once a machine.
"""

import os
import sys
from collections.abc import Callable, Mapping

BRIEF = {"GOMP_SPINCOUNT": "1000"}
"""A good choice on every machine that was measured, and the best one on a busy machine."""
CHOICES: dict[str, dict[str, str]] = {"brief": BRIEF, "long": {}}
"""Environment variables by the length of the wait; long is what OpenMP does by itself."""
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_CPU_AFFINITY")
"""What a user sets to decide how threads wait; the lab then leaves it to the user."""
IS_LEFT_TO_USER = any(name in os.environ for name in VARIABLES)
WORTHWHILE = 0.95
"""Long waits are chosen if steps take less than this share of their time with brief ones."""
TIMEOUT = 60
"""Seconds after which a measurement is given up."""
WORKLOAD = """
import time, torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(4096, 64)
blocks = [(nn.Linear(64, 64), nn.RMSNorm(64), nn.SiLU()) for _ in range(4)]
model = nn.Sequential(*[layer for block in blocks for layer in block])
times = []
for _ in range(60):
    began = time.perf_counter()
    model(x).square().mean().backward()
    times.append(time.perf_counter() - began)
print(sorted(times[10:])[25])
"""
"""A program that prints the seconds of a step of many small operations, as training has them."""


def wait_briefly() -> None:
    """Set a brief wait, unless the user has set one."""
    if not IS_LEFT_TO_USER:
        os.environ.update(BRIEF)


def choose_wait(on_note: Callable[[str], None]) -> None:
    """Set the wait that is faster on this machine; measure that first if it is not known.

    The wait stays brief beside other busy processes, and where it has no effect: on one core, after
    torch was imported, and on other systems than Linux.

    Args:
        on_note: called with what is done now, before a measurement.
    """
    # Only training needs these, and other commands should start fast.
    from lab.machine import processor
    from lab.machine.measurements import read, remember

    has_effect = sys.platform == "linux" and "torch" not in sys.modules
    if IS_LEFT_TO_USER or not has_effect or processor.count_cores() == 1 or processor.is_busy():
        return
    machine = processor.describe_machine()
    chosen = read("spinning").get(machine)
    if chosen not in CHOICES:
        on_note("measuring this machine, once: a few seconds")
        seconds = {name: _time_steps(variables) for name, variables in CHOICES.items()}
        chosen = "long" if seconds["long"] < WORTHWHILE * seconds["brief"] else "brief"
        if max(seconds.values()) < float("inf") and not processor.is_busy():
            remember("spinning", machine, chosen)
    for name in BRIEF:
        del os.environ[name]
    os.environ.update(CHOICES[chosen])


def _time_steps(variables: Mapping[str, str]) -> float:
    """Return the seconds of a step in a process with these variables; infinity if it fails."""
    import subprocess

    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-P", "-c", WORKLOAD]
    try:
        done = subprocess.run(
            command, env={**plain, **variables}, capture_output=True, timeout=TIMEOUT, check=True
        )
        return float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return float("inf")
