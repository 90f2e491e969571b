"""How long a training step takes here: in each precision, on more and on fewer threads.

A processor's flags do not tell whether bf16 is faster: some that advertise bf16 products run them
at half the speed of fp32. Nor does the number of cores tell how many threads are: small operations
wait for one another, and for whoever else wants a core (LOG.md has machines of each kind). So a run
times its own step before the first one, and chooses its threads again when steps become slow.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from lab.lengthening import Stage, list_stages
from lab.machine import use_threads
from lab.models import LanguageModel
from lab.training.graphs import record_gradients
from lab.training.loop import Row, differentiate
from lab.training.run import Run

SECONDS = 1.0
"""About how long to measure; every choice is measured at least once."""
WORTHWHILE = 0.95
"""More threads, or bf16, are chosen if steps take at most this share of the time without."""
SLOW, RECENT = 3.0, 5
"""Threads are chosen again when the last steps take this many times as long as usual."""


@dataclass(frozen=True)
class StepTime:
    """The measured time of a training step, without its optimizer.

    Attributes:
        precision: "fp32" or "bf16".
        threads: of the CPU.
        seconds: of a step with the shortest rows and one with the longest together, the median;
            NaN where there was nothing to choose.
    """

    precision: str
    threads: int
    seconds: float


def measure_choices(
    run: Run, device: torch.device, precision: str, counts: Sequence[int]
) -> list[StepTime]:
    """Return how long a run's steps take: the best choice first, then the others by time.

    Where there is one choice, nothing is measured.

    Args:
        run: the run; its model is built again to be timed.
        device: where to compute.
        precision: "fp32", "bf16" or "auto".
        counts: numbers of threads of the CPU to choose from, the smallest first.
    """
    precisions = list_precisions(device) if precision == "auto" else (precision,)
    choices = [(each, count) for each in precisions for count in counts]
    if len(choices) == 1:
        return [StepTime(*choices[0], math.nan)]
    stages = list_stages(run.task, run.train)
    return time_choices(run.build().to(device), [stages[0], stages[-1]], choices)


def time_choices(
    model: LanguageModel, stages: Sequence[Stage], choices: Sequence[tuple[str, int]]
) -> list[StepTime]:
    """Time the steps of some stages for each choice; return the best first, the others by time.

    The choices take turns, so that other programs disturb them alike. The weights stay.

    Args:
        model: whose step is timed.
        stages: whose rows are taken.
        choices: precision and threads, the plainest first; a later one must be worth while.
    """
    device = next(model.parameters()).device
    batches = [stage.task.batch(size=stage.batch_size, device=device) for stage in stages]
    steps = {
        precision: [record_gradients(differentiate, model, batch, precision) for batch in batches]
        for precision, _ in choices
    }
    taken: dict[tuple[str, int], list[float]] = {choice: [] for choice in choices}
    began, rounds = time.perf_counter(), 0
    # The first round warms up: it allocates memory, chooses kernels and fills caches.
    while rounds < 2 or time.perf_counter() - began < SECONDS:
        for (precision, threads), times in taken.items():
            with use_threads(threads), torch.random.fork_rng():
                before = time.perf_counter()
                for step in steps[precision]:
                    step().item()  # waits for a GPU
                times.append(time.perf_counter() - before)
        rounds += 1
    model.zero_grad(set_to_none=True)
    found = [StepTime(*choice, median(times[1:])) for choice, times in taken.items()]
    best = found[0]
    for other in found[1:]:
        if other.seconds <= WORTHWHILE * best.seconds:
            best = other
    return [best, *sorted((f for f in found if f is not best), key=lambda f: f.seconds)]


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


class Pace:
    """Notices when the steps of a training become slow, as beside a program that began later."""

    def __init__(self) -> None:
        self._reset(0)

    def _reset(self, seq_len: int) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._seq_len, self._usual = seq_len, math.inf

    def is_slow(self, row: Row) -> bool:
        """Take in a step; return whether the last ones took `SLOW` times as long as usual.

        What is usual is the fastest so far at this row length, and is forgotten when it is passed.
        """
        if row.seq_len != self._seq_len:
            self._reset(row.seq_len)
        self._recent.append(row.seconds)
        if len(self._recent) < RECENT:
            return False
        now = median(self._recent)
        if now > SLOW * self._usual:
            self._reset(row.seq_len)
            return True
        self._usual = min(self._usual, now)
        return False
