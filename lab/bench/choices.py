"""The step with what a run chooses, precision, threads and wait, against each fixed choice.

A run times its own steps (`lab.training.step_time`) and, once a machine, how threads wait for one
another (`lab.machine.spinning`). Here its choice takes turns with every other one: whole steps, in
a process for each wait, because OpenMP reads it when torch is imported. Wall time, so it wants a
machine with nothing beside.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import NamedTuple

import torch

from lab.bench.ratio import Ratio
from lab.bench.stepping import prepare_steps
from lab.lengthening import list_stages
from lab.machine.clocks import read_clocks
from lab.machine.memory import keep_freed_memory
from lab.machine.spinning import CHOICES as WAITS
from lab.machine.spinning import VARIABLES
from lab.training.runs import Run
from lab.training.step_time import list_precisions, list_thread_counts, use_threads
from lab.training.step_time import measure as time_choices
from lab.training.stepper import Stepper

CPU = torch.device("cpu")
SETTINGS = (
    ("AM*2", 64, 256, 64),
    ("AM*2", 256, 8192, 16),
    ("AM*2", 2048, 8192, 2),
    ("SM*2", 64, 256, 64),
    ("SE IE", 64, 256, 16),
)
"""(stack, seq_len, vocab_size, rows a step); the first is the main job's."""
TARGET = 1 / 1.05
"""A run's choice takes at most 1.05 times as long as the best fixed one."""
FORMER_TARGET = 2.2
"""How many times as fast it is as what runs took before they measured, where bf16 is slow."""
ROUNDS, SECONDS = 9, 0.2
"""Turns of each choice, and about how long one lasts."""

FIND_WAIT = """
import os
from lab.machine.spinning import choose_wait, wait_briefly
wait_briefly()
choose_wait(lambda note: None)
print(os.environ.get("GOMP_SPINCOUNT"))
"""
"""A program that prints how long threads spin in a command that trains."""


class FixedChoice(NamedTuple):
    """How a run computes: `wait` is a name of `lab.machine.spinning.CHOICES`."""

    wait: str
    precision: str
    threads: int

    def __str__(self) -> str:
        if self.threads == 1:  # it waits for no other thread
            return f"{self.precision}, 1 thread"
        return f"{self.precision}, {self.threads} threads, {self.wait} waits"


Times = Mapping[FixedChoice, Sequence[float]]
"""Seconds of a step, one for each round."""


def measure() -> list[Ratio]:
    """Measure each setting with all choices, and which of them a run takes."""
    wait, choices = _find_wait(), list_choices()
    ratios = []
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_start(WAITS[name])) for name in WAITS}
        for number, (kind, seq_len, vocab_size, rows) in enumerate(SETTINGS):
            workers[wait].send((number, None))
            precision, threads = workers[wait].recv()
            chosen = FixedChoice("brief" if threads == 1 else wait, precision, threads)
            times: dict[FixedChoice, list[float]] = {choice: [] for choice in choices}
            for _ in range(ROUNDS):
                for choice, taken in times.items():
                    workers[choice.wait].send((number, choice))
                    taken.append(workers[choice.wait].recv())
            where = f"{kind}, T={seq_len}, V={vocab_size}, {rows} rows"
            ratios.append(compare_with_best(where, times, chosen))
            if number == 0 and "bf16" in list_precisions(CPU):
                ratios.append(compare_with_former(where, times, chosen))
    return ratios


def list_choices() -> list[FixedChoice]:
    """Return all that a run on this CPU may choose; one thread never waits."""
    return [
        FixedChoice(wait, precision, threads)
        for precision in list_precisions(CPU)
        for threads in list_thread_counts(CPU)
        for wait in (("brief",) if threads == 1 else WAITS)
    ]


def compare_with_best(where: str, times: Times, chosen: FixedChoice) -> Ratio:
    """Compare what a run chose with the fixed choice that was the fastest."""
    best = min(times, key=lambda choice: median(times[choice]))
    others = ", ".join(
        f"{choice} {1e3 * median(taken):.3g}"
        for choice, taken in sorted(times.items(), key=lambda item: median(item[1]))
    )
    name = f"step as a run chooses, against the best fixed choice, {where}"
    return _compare(name, times[chosen], times[best], TARGET, f"chosen: {chosen}; ms: {others}")


def compare_with_former(where: str, times: Times, chosen: FixedChoice) -> Ratio:
    """Compare what a run chose with what runs took before: bf16, all threads, brief waits."""
    former = FixedChoice("brief", "bf16", max(choice.threads for choice in times))
    if former.threads == 1:
        former = next(choice for choice in times if choice.precision == "bf16")
    fastest = min(times, key=lambda choice: median(times[choice]))
    target = 1.0 if fastest.precision == "bf16" else FORMER_TARGET
    name = f"step as a run chooses, against {former}, {where}"
    return _compare(name, times[chosen], times[former], target, f"chosen: {chosen}")


def _compare(
    name: str, ours: Sequence[float], theirs: Sequence[float], target: float, note: str
) -> Ratio:
    """Return the ratio of two series taken in turns, with its quartiles."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    spread = f"quartiles {low:.2f} to {high:.2f}; load {os.getloadavg()[0]:.1f}"
    milliseconds = (1e3 * median(ours), 1e3 * median(theirs))
    return Ratio(name, *milliseconds, "ms", middle, target, f"{spread}; {note}")


def _find_wait() -> str:
    """Return the wait that a command of this machine chooses before it imports torch."""
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-P", "-c", FIND_WAIT]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    found = done.stdout.split()[-1]
    return next(name for name in WAITS if WAITS[name].get("GOMP_SPINCOUNT", "None") == found)


@contextmanager
def _start(variables: Mapping[str, str]) -> Iterator[Connection]:
    """Start a process with these variables that times steps, for a `with` block."""
    kept = dict(os.environ)
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    try:
        process = context.Process(target=serve, args=(theirs,))
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    theirs.close()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


def serve(orders: Connection) -> None:
    """Answer orders until one is None: (a number of `SETTINGS`, a choice to time a step with).

    In place of a choice, None asks for the precision and the threads that a run chooses here.
    """
    keep_freed_memory()
    for number, choice in iter(orders.recv, None):
        run, stepper = _prepare(number)
        if choice is None:
            stages = list_stages(run.task, run.train)
            best, *_ = time_choices(run, stages, CPU, run.train.precision, None)
            orders.send((best.precision, best.threads))
        else:
            orders.send(_time_step(stepper, choice))


@lru_cache(maxsize=1)
def _prepare(number: int) -> tuple[Run, Stepper]:
    return prepare_steps(*SETTINGS[number], CPU)


def _time_step(stepper: Stepper, choice: FixedChoice) -> float:
    """Return the median seconds of some steps, after one that is not counted."""
    taken: list[float] = []
    with use_threads(choice.threads):
        _take_step(stepper, choice.precision)
        while sum(taken) < SECONDS:
            taken.append(_take_step(stepper, choice.precision))
    return median(taken)


def _take_step(stepper: Stepper, precision: str) -> float:
    """Take a step of training; return its seconds."""
    began = read_clocks()
    stepper.take_step(precision)
    return (read_clocks() - began).wall
