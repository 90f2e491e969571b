"""Measuring how long a training step takes here: in each precision, on more and fewer threads.

A processor's flags do not tell whether bf16 is faster: some that advertise bf16 products run them
at half the speed of fp32. Nor does the number of cores tell how many threads are: small operations
wait for one another (LOG.md has machines of each kind). So a run times its own step.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lab.lengthening import Stage
from lab.machine.device import describe_device
from lab.machine.measurements import read, remember
from lab.machine.processor import count_cores, count_free_cores
from lab.models.language_model import LanguageModel
from lab.training.gradients import StepResult
from lab.training.recorded_step import record_gradients
from lab.training.runs import Run

SECONDS = 1.0
"""About how long to measure; every case is measured at least once."""
WORTHWHILE = 0.97
"""More threads, or bf16, are chosen if steps take at most this share of the time without."""
KIND = "step_time"
"""What `lab.machine.measurements` calls these."""
VERSION = 3
"""Version of the measurement; kept results of other versions are not used."""


@dataclass(frozen=True)
class StepTime:
    """The measured time of a training step, without its optimizer.

    Attributes:
        precision: "fp32" or "bf16".
        threads: of the CPU.
        first: seconds of a step in the first, shortest stage.
        last: seconds of a step at the task's own row length.
        disturbed: whether other processes used this machine's cores meanwhile.
    """

    precision: str
    threads: int
    first: float
    last: float
    disturbed: bool = False

    @property
    def total(self) -> float:
        """Seconds of both steps, which choices are compared by."""
        return self.first + self.last

    @property
    def plausible(self) -> bool:
        """Whether these values can come from a measurement."""
        times = all(0 < t < math.inf for t in (self.first, self.last))
        return self.precision in ("fp32", "bf16") and self.threads >= 1 and times


def measure(
    run: Run,
    parts: Sequence[Stage],
    device: torch.device,
    precision: str,
    threads: int | None,
    *,
    choose_only: bool = False,
) -> list[StepTime]:
    """Return how long a run's steps take: the best choice first, then the others by time.

    Where there is one choice and one stage, nothing is measured, and the times are NaN.
    The measurement is kept in the user's cache folder, by machine and run, unless other processes
    disturb it. Then threads are tried only up to the number of free cores.

    Args:
        run: the run; its model is built again to be timed.
        parts: the stages of training.
        device: where to compute.
        precision: "fp32", "bf16" or "auto".
        threads: of the CPU; None tries one, two, four and so on, up to what torch would take.
        choose_only: whether nobody asks for the times, so that one choice needs no measurement.
    """
    counts = [threads] if threads else list_thread_counts(device)
    precisions = list_precisions(device) if precision == "auto" else (precision,)
    if len(counts) == len(precisions) == 1 and (choose_only or len(parts) == 1):
        return [StepTime(precisions[0], counts[0], math.nan, math.nan)]
    on_cpu, key = device.type == "cpu", digest_setting(run, parts, device, precision, counts)
    free = count_free_cores() if on_cpu else count_cores()
    disturbed = free < count_cores()
    known = [] if disturbed else _parse(read(KIND).get(key))
    if known:
        return known
    counts = [count for count in counts if count <= free] or counts[:1]
    choices = [(precision, count) for precision in precisions for count in counts]
    found = find_fastest(run.build().to(device), [parts[0], parts[-1]], choices, SECONDS)
    if disturbed or (on_cpu and count_free_cores() < count_cores()):
        return [replace(each, disturbed=True) for each in found]
    remember(KIND, key, [asdict(each) for each in found])
    return found


def find_fastest(
    model: LanguageModel,
    parts: Sequence[Stage],
    choices: Sequence[tuple[str, int]],
    seconds: float,
) -> list[StepTime]:
    """Time the steps of two stages for each choice; return the best first, the others by time.

    A time is that of the fastest step. The model's weights stay as they are.

    Args:
        model: whose step is timed.
        parts: the first and the last stage.
        choices: precision and threads, the plainest first; a later one must be worth while.
        seconds: about how long to measure; 0: one step of each after one to warm up.
    """
    device = next(model.parameters()).device
    batches = [part.task.batch(size=part.batch_size, device=device) for part in parts]
    steps = {
        precision: [record_gradients([model], [batch], precision) for batch in batches]
        for precision, _ in choices
    }
    fastest = {choice: [math.inf] * len(parts) for choice in choices}
    began, rounds = time.perf_counter(), 0
    # The first round warms up: it allocates memory, chooses kernels and fills caches.
    while rounds < 2 or time.perf_counter() - began < seconds:
        for (precision, threads), times in fastest.items():
            with use_threads(threads):
                for i, step in enumerate(steps[precision]):
                    taken = _time_step(step)
                    times[i] = min(times[i], taken) if rounds else math.inf
        rounds += 1
    model.zero_grad(set_to_none=True)
    found = [
        StepTime(precision, threads, first, last)
        for (precision, threads), (first, last) in fastest.items()
    ]
    best = found[0]
    for other in found[1:]:
        if other.total <= WORTHWHILE * best.total:
            best = other
    return [best, *sorted((f for f in found if f is not best), key=lambda f: f.total)]


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def list_thread_counts(device: torch.device) -> list[int]:
    """Return 1, 2, 4 and so on up to the number that torch takes; on a GPU only that number."""
    most = torch.get_num_threads()
    if device.type != "cpu":
        return [most]
    return [*(2**i for i in range((most - 1).bit_length())), most]


def list_precisions(device: torch.device) -> tuple[str, ...]:
    """Return the precisions in which the device can multiply, "fp32" first."""
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return ("fp32", "bf16") if has else ("fp32",)


def _time_step(step: Callable[[], list[StepResult]]) -> float:
    """Return the seconds of a forward and backward pass."""
    began = time.perf_counter()
    with torch.random.fork_rng():
        step()[0].loss.item()  # waits for a GPU
    return time.perf_counter() - began


def digest_setting(
    run: Run,
    parts: Sequence[Stage],
    device: torch.device,
    precision: str,
    threads: Sequence[int],
) -> str:
    """Return a digest of everything that a step's time depends on."""
    sizes = [(part.task.describe(), part.batch_size) for part in (parts[0], parts[-1])]
    machine = describe_device(device)
    facts = [VERSION, machine, list(threads), precision, sizes, run.model.to_dict()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _parse(content: Any) -> list[StepTime]:
    """Return kept step times; none if they are not such."""
    try:
        found = [StepTime(**each) for each in content]
        return found if all(each.plausible for each in found) else []
    except TypeError:
        return []
