"""What a sweep costs: a step of each size is timed before it starts, and runs while it goes on."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from lab.lengthening import list_stages
from lab.machine.device import choose_device
from lab.training.records import StepTimes, find_record
from lab.training.runs import Run
from lab.training.step_time import find_fastest


@dataclass(frozen=True)
class RunCost:
    """What a run costs.

    Attributes:
        steps: the most that it takes.
        step: seconds of a step at the full row length.
        most: seconds of all its steps, at its full row length.
        usual: seconds that runs with its settings take until they are solved; None if unknown.
    """

    steps: int
    step: float
    most: float
    usual: float | None


def find_size(run: Run) -> str:
    """Return what the time of a run depends on; runs of one size are alike in it."""
    sizes = [
        (stage.task.describe(), stage.batch_size) for stage in list_stages(run.task, run.train)
    ]
    train = run.train
    parts = [sizes, run.model.to_dict(), train.precision, train.optimizer, train.max_steps]
    return json.dumps(parts, sort_keys=True)


def time_run(run: Run, device: str = "auto", threads: int = 1) -> RunCost:
    """Time a step at the run's first and last row length, after one to warm up.

    Raises:
        ValueError: for a model that cannot be built.
    """
    stages = list_stages(run.task, run.train)
    model = run.build().to(choose_device(device))
    choices = [(run.train.precision, threads)]
    timed, *_ = find_fastest(model, [stages[0], stages[-1]], choices, seconds=0)
    ends = stages[0].task.seq_len, stages[-1].task.seq_len
    times = StepTimes(timed.first, ends[0], *ends, timed.last / timed.first)
    record = find_record(run) if run.train.early_stop else None
    usual = record.estimate_rest(0, times)[1] if record else None
    steps = run.train.max_steps
    return RunCost(steps, timed.last, steps * max(timed.first, timed.last), usual)


@dataclass(frozen=True)
class Pace:
    """How fast a running cell goes.

    Attributes:
        seconds: since it was begun, or resumed.
        first: the step that it was begun or resumed after.
        step: the step that it has taken.
    """

    seconds: float
    first: int
    step: int

    def extrapolate(self, steps: int, otherwise: float) -> float:
        """Return the seconds until so many steps are taken; otherwise, before the first step."""
        taken = self.step - self.first
        return self.seconds * (steps - self.step) / taken if taken > 0 else otherwise


class TimeLeft:
    """How long a sweep still takes, from what its runs have taken so far.

    Args:
        sizes: of the runs to do, by the name of the cell (`find_size`).
        costs: of each size.
        workers: cells at a time.
        max_minutes: most minutes of a run; None: no limit.
    """

    def __init__(
        self,
        sizes: Mapping[str, str],
        costs: Mapping[str, RunCost],
        workers: int,
        max_minutes: float | None,
    ):
        self.sizes, self.costs, self.workers = dict(sizes), costs, workers
        self.limit = float("inf") if max_minutes is None else 60 * max_minutes
        self.taken: dict[str, list[float]] = {}

    def note(self, cell: str, seconds: float) -> None:
        """Note that a cell has ended after so many seconds; it is no longer to do."""
        size = self.sizes.pop(cell, None)
        if size is not None:
            self.taken.setdefault(size, []).append(seconds)

    def estimate(self, running: Mapping[str, Pace]) -> tuple[float, bool]:
        """Return the seconds left, and whether some runs are taken to go on to their limits.

        Runs of a size of which one has ended take as long as those; others take their usual time,
        or else all their steps. A run that has taken longer goes on at its pace.
        """
        rest, bound = 0.0, False
        for cell, size in self.sizes.items():
            taken, cost = self.taken.get(size), self.costs[size]
            expected = median(taken) if taken else cost.usual
            bound |= expected is None
            left = cost.most if expected is None else expected
            pace = running.get(cell)
            if pace is not None:
                left -= pace.seconds
                if left <= 0 or expected is None:
                    bound, left = True, pace.extrapolate(cost.steps, otherwise=cost.most)
            rest += max(0.0, min(self.limit - (pace.seconds if pace else 0.0), left))
        return rest / min(self.workers, max(1, len(self.sizes))), bound


def add_up(costs: Iterable[RunCost], workers: int, max_minutes: float | None) -> float:
    """Return the seconds that runs take to their limits on so many workers."""
    limit = float("inf") if max_minutes is None else 60 * max_minutes
    most = [min(limit, cost.most) for cost in costs]
    return max(sum(most) / workers, max(most, default=0.0))
