"""Measuring whether several models of one shape train faster together or one after another.

Together is faster where a step consists of many small operations, and no faster where its products
are large: then the lanes' activations do not stay in the processor's cache (LOG.md).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from lab.lengthening import Stage, list_stages
from lab.machine.measurements import read, remember
from lab.models import LanguageModel
from lab.models.reading import sees_all
from lab.models.user_mixer import is_from_lab
from lab.training.gradients import differentiate, differentiate_lanes
from lab.training.recorded_step import record_gradients
from lab.training.runs import Run
from lab.training.step_time import digest_setting, use_threads
from tasks.base import Batch

SECONDS, QUICK = 2.0, 0.5
"""About how long to measure: one choice, and each of the many of a sweep."""
KIND = "lane_time"
"""What `lab.machine.measurements` calls these."""
WORTHWHILE = 0.9
"""Lanes share their steps if these take at most this share of the time one after another."""
FULL = "the GPU's memory does not hold them together"
"""An obstacle that is not kept, since another time more memory may be free."""
CLOSE = 1e-3
"""Share of a parameter's largest gradient by which rounding in fp32 may move one."""


@dataclass(frozen=True)
class LaneTime:
    """The measured time of a step of all lanes: forward and backward.

    Attributes:
        together: seconds as one computation; NaN if not measured.
        apart: seconds one after another; NaN if not measured.
        obstacle: why they cannot be computed together; empty if they can.
        chosen: whether they are, where that was not left to the measurement.
    """

    together: float = math.nan
    apart: float = math.nan
    obstacle: str = ""
    chosen: bool | None = None

    @property
    def shared(self) -> bool:
        """Whether lanes are to be computed together."""
        if self.chosen is not None:
            return self.chosen
        return self.share <= WORTHWHILE

    @property
    def share(self) -> float:
        """Time together, as a share of the time one after another; NaN if not measured."""
        return self.together / self.apart

    def __str__(self) -> str:
        if self.obstacle:
            return f"one after another: {self.obstacle}"
        if self.chosen is not None:
            return "together, as before" if self.chosen else "one after another, as asked"
        if math.isnan(self.apart):
            return "one after another: there is one"
        way = "together" if self.shared else "one after another"
        return f"{way}: a step of all takes {self.share:.2f} times as long together"


def time_lanes(run: Run, count: int, device: torch.device, threads: int) -> LaneTime:
    """Return how long the steps of runs that differ in the seed take, both ways.

    The measurement is kept in the user's cache folder, by machine, run and number of lanes, so that
    a sweep that is resumed computes as before.

    Args:
        run: one of them; its models are built to be timed.
        count: how many.
        device: where to compute.
        threads: of the CPU.
    """
    stages = list_stages(run.task, run.train)
    key = digest_setting(run, stages, device, run.train.precision, (count, threads))
    known = _parse(read(KIND).get(key))
    if known is not None:
        return known
    seeds = [replace(run, train=replace(run.train, seed=seed)) for seed in range(count)]
    models = [each.build().to(device) for each in seeds]
    with use_threads(threads):
        found = measure_lanes(models, stages, run.train.precision, QUICK)
    if found.obstacle != FULL:
        remember(KIND, key, asdict(found))
    return found


def _parse(content: Any) -> LaneTime | None:
    """Return a kept measurement; None if it is none."""
    try:
        found = LaneTime(**content)
        times = all(0 < t < math.inf for t in (found.together, found.apart))
        return found if times or (found.obstacle and isinstance(found.obstacle, str)) else None
    except TypeError:
        return None


def measure_lanes(
    models: Sequence[LanguageModel],
    stages: Sequence[Stage],
    precision: str,
    seconds: float | None = None,
) -> LaneTime:
    """Return how long the steps of the first and the last stage take, both ways.

    The models keep their weights. With a mixer of the user's, together must give the
    gradients of one after another. On one thread of a CPU the time is the processor's, which other
    programs do not change much.

    Args:
        models: of one shape.
        stages: of training.
        precision: "fp32" or "bf16".
        seconds: about how long to measure; each way is measured at least once; None: `SECONDS`.
    """
    seconds = SECONDS if seconds is None else seconds
    if len(models) < 2:
        return LaneTime()
    model, device = models[0], next(models[0].parameters()).device
    if any(sees_all(module) for module in model.modules()):
        return LaneTime(obstacle="dropout and batch normalisation need each run's own state")
    parts = [stages[0]] if len(stages) == 1 else [stages[0], stages[-1]]
    batches = [
        [part.task.batch(size=part.batch_size, seed=z, device=device) for z in range(len(models))]
        for part in parts
    ]
    try:
        obstacle = _find_obstacle(models, batches[0])
        if obstacle:
            return LaneTime(obstacle=obstacle)
        together, apart = _time_both(models, batches, precision, seconds)
    except torch.OutOfMemoryError:  # of a GPU
        return LaneTime(obstacle=FULL)
    finally:
        drop_gradients(models)
    return LaneTime(together, apart)


def _time_both(
    models: Sequence[LanguageModel],
    batches: Sequence[Sequence[Batch]],
    precision: str,
    seconds: float,
) -> tuple[float, float]:
    """Return the seconds of a step of each stage, together and apart, by the batches of stages."""
    ways = [
        [prepare(models, of_part, precision) for of_part in batches]
        for prepare in (_prepare_together, _prepare_apart)
    ]
    fastest = [[math.inf] * len(batches) for _ in ways]
    device = batches[0][0].inputs.device
    on_cpu = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if on_cpu else time.perf_counter
    for steps in ways:  # the first call of each allocates memory and fills caches
        steps[0]()
    began = time.perf_counter()
    while True:
        for steps, times in zip(ways, fastest, strict=True):
            for i, step in enumerate(steps):
                before = clock()
                with torch.random.fork_rng():
                    step()
                times[i] = min(times[i], clock() - before)
        if time.perf_counter() - began >= seconds:
            together, apart = map(sum, fastest)
            return together, apart


def _prepare_together(
    models: Sequence[LanguageModel], batches: Sequence[Batch], precision: str
) -> Callable[[], None]:
    differentiate_all = record_gradients(models, batches, precision)

    def step() -> None:
        differentiate_all()[-1].loss.item()  # waits for a GPU
        drop_gradients(models)

    return step


def _prepare_apart(
    models: Sequence[LanguageModel], batches: Sequence[Batch], precision: str
) -> Callable[[], None]:
    # On a GPU all take equally long, and each recording would take memory: time one of them.
    count = 1 if batches[0].inputs.is_cuda else len(models)
    steps = [record_gradients([models[z]], [batches[z]], precision) for z in range(count)]
    steps *= len(models) // count

    def step() -> None:
        for take in steps:
            take()[0].loss.item()

    return step


def _find_obstacle(models: Sequence[LanguageModel], batches: Sequence[Batch]) -> str:
    """Return why models with a mixer of the user's cannot be computed together; empty if they can.

    The lab's own layers are tested. In bf16 rounding may choose other experts, so this is in fp32.
    """
    mixers = [block.mixer for block in models[0].blocks]
    foreign = [m for m in mixers if isinstance(m, nn.Module) and not is_from_lab(m)]
    if not foreign:
        return ""
    buffers = [buffer.clone() for buffer in models[0].buffers()]
    try:
        differentiate_lanes(models, batches, "fp32")
        together = _take_gradients(models)
        # A second time, as the first may have left something behind.
        differentiate_lanes(models, batches, "fp32")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the user's code may raise anything under vmap
        return f"torch.func.vmap cannot run {type(foreign[0]).__name__}: {_shorten(error)}"
    finally:
        drop_gradients(models)
    for model, batch in zip(models, batches, strict=True):
        differentiate(model, batch, "fp32")
    apart = _take_gradients(models)
    drop_gradients(models)
    if not all(map(torch.equal, buffers, models[0].buffers())):
        return "a mixer changes its buffers in training"
    for mine, own in zip(together, apart, strict=True):
        if not (mine - own).abs().max() <= CLOSE * own.abs().max():
            return "the gradients of together are not those of one after another"
    return ""


def _take_gradients(models: Sequence[LanguageModel]) -> list[torch.Tensor]:
    """Return a copy of each gradient; of what has none, zeros."""
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for model in models
        for p in model.parameters()
    ]


def drop_gradients(models: Sequence[LanguageModel]) -> None:
    """Drop the gradients of models, so that the next ones are not added to them."""
    for model in models:
        model.zero_grad(set_to_none=True)


def _shorten(error: Exception) -> str:
    """Return the first sentence of an error's message."""
    return str(error).strip().split("\n")[0].split(". ")[0] or type(error).__name__
