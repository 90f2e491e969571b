"""What a step of several runs costs, measured side by side: time, memory, or parameters.

The settings that are compared take turns, so that noise affects them alike. On a CPU, time is that
of the processor on one thread; on a GPU it is that of the clock on the wall, with the device idle
before and after.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from lab.bench.peak import measure_peak
from lab.bench.ratio import take_turns
from lab.machine import choose_device, use_threads
from lab.models import LanguageModel
from lab.models.anatomy import dissect
from lab.models.evaluation import score
from lab.training.loop import differentiate
from lab.training.run import Run

Cost = Literal["training", "forward", "memory", "parameters", "active"]
"""Seconds forward and backward, seconds forward, the tensors' most bytes forward and backward, all
parameters, and those that one token uses."""
ROUNDS = 9
"""Rounds of turns in which times are taken."""


def measure_costs(runs: Sequence[Run], cost: Cost, device: str = "auto") -> list[list[float]]:
    """Return what a batch of rows costs each run: a value a round, or one where all are the same.

    A batch has the rows of a step at the run's full length, and the model its initial weights.

    Args:
        runs: whose costs are compared.
        cost: what to measure.
        device: to compute on.
    """
    models = [run.build() for run in runs]
    if cost in ("parameters", "active"):
        counts = [dissect(model) for model in models]
        return [[float(c.total if cost == "parameters" else c.active)] for c in counts]
    where = choose_device(device)
    calls = [
        _prepare(run, model.to(where), where, backward=cost != "forward")
        for run, model in zip(runs, models, strict=True)
    ]
    with use_threads(1):
        if cost == "memory":
            return [[float(measure_peak(call))] for call in calls]
        for call in calls:
            call()
        return take_turns(calls, ROUNDS, _choose_clock(where))


def _prepare(
    run: Run, model: LanguageModel, device: torch.device, *, backward: bool
) -> Callable[[], object]:
    batch = run.task.batch(size=run.train.batch_size, seed=run.train.seed, device=device)
    precision = run.train.precision

    def train() -> None:
        model.zero_grad(set_to_none=True)
        differentiate(model, batch, precision)

    @torch.no_grad()
    def read() -> None:
        score(model, batch, precision)

    return train if backward else read


def _choose_clock(device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return time.process_time

    def read_clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read_clock
