"""Which cells of a sweep are computed together, as lanes of one process (`lab.training.lanes`).

Cells go together if they differ in seed, learning rate, data or initial weights only, and if that
is faster: a step of them is timed both ways, once for each shape. The groups depend on the whole
sweep and the number of workers alone, so that a sweep that is resumed has the same, unless a GPU's
memory was too full to time them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lab.config import Runtime
from lab.lengthening import list_stages
from lab.machine.device import choose_device
from lab.machine.memory import measure_free_memory
from lab.sweeps.sweep import Cell
from lab.training.footprint import count_fitting_lanes
from lab.training.lane_time import LaneTime, time_lanes
from lab.training.lanes import FREE
from lab.training.runs import Run

MOST_LANES = 8
"""Runs of a group: more gain little (LOG.md), and a killed process loses the steps of all."""

Described = tuple[Run, Runtime]


@dataclass(frozen=True)
class LanePlan:
    """Which cells go together.

    Attributes:
        groups: all cells, each group for one process at a time.
        times: what was measured, one for each shape.
    """

    groups: tuple[tuple[Cell, ...], ...]
    times: tuple[LaneTime, ...] = ()
    sizes: Mapping[str, int] = field(init=False)

    def __post_init__(self):
        sizes = {cell.name: len(group) for group in self.groups for cell in group}
        object.__setattr__(self, "sizes", sizes)

    def describe(self) -> str:
        """Say how many runs go together and how much faster that is; empty if nothing was asked."""
        known = [time for time in self.times if not time.obstacle]
        together = sum(len(group) for group in self.groups if len(group) > 1)
        if together:
            most = max(map(len, self.groups))
            faster = _describe_range([time for time in known if time.shared])
            rest = list(self.sizes.values()).count(1)
            others = f", {rest} alone" if rest else ""
            return (
                f"{together} runs compute together, up to {most} in a process{others}: a step of "
                f"them takes {faster} times as long as one after another."
            )
        if known:
            return (
                "Each run computes alone: together, a step of several takes "
                f"{_describe_range(known)} times as long as one after another."
            )
        obstacles = sorted({time.obstacle for time in self.times})
        return f"Each run computes alone: {'; '.join(obstacles)}." if obstacles else ""


def _describe_range(times: Sequence[LaneTime]) -> str:
    shares = sorted(f"{time.share:.2f}" for time in times)
    return shares[0] if shares[0] == shares[-1] else f"{shares[0]} to {shares[-1]}"


def find_shape(run: Run, runtime: Runtime) -> str:
    """Return what runs must have in common to be computed together."""
    model = {name: value for name, value in run.model.to_dict().items() if name not in FREE}
    sizes = [(stage.task.seq_len, stage.batch_size) for stage in list_stages(run.task, run.train)]
    parts = [model, run.task.vocab_size, sizes, run.train.precision, runtime.to_dict()]
    return json.dumps(parts, sort_keys=True)


def choose_lanes(
    cells: Sequence[Cell],
    described: Mapping[str, Described],
    todo: Sequence[str],
    workers: int,
    on_note: Callable[[str], None] = lambda text: None,
) -> LanePlan:
    """Group the cells of a sweep, in the order of each group's first.

    Args:
        cells: all of the sweep.
        described: the run and the machine settings of each, by name.
        todo: names of those that are still to be trained; shapes of others are not timed.
        workers: processes at a time; no group is so large that one would have nothing to do.
        on_note: called with what is timed, before it is.
    """
    by_shape: dict[str, list[Cell]] = {}
    for cell in cells:
        by_shape.setdefault(find_shape(*described[cell.name]), []).append(cell)
    most = min(MOST_LANES, -(-len(cells) // workers))
    groups, times = [], []
    for alike in by_shape.values():
        size = min(most, len(alike))
        if size > 1 and sum(cell.name in todo for cell in alike) > 1:
            on_note(f"timing {size} runs together: {alike[0].name}")
            found, fitting = _time(*described[alike[0].name], size, workers)
            times.append(found)
            size = fitting if found.shared else 1
        else:
            size = 1
        # Of equal size, as far as possible.
        count = -(-len(alike) // size)
        groups += [tuple(alike[i::count]) for i in range(count)]
    place = {cell.name: i for i, cell in enumerate(cells)}
    return LanePlan(tuple(sorted(groups, key=lambda group: place[group[0].name])), tuple(times))


def _time(run: Run, runtime: Runtime, size: int, workers: int) -> tuple[LaneTime, int]:
    """Return how long runs of a shape take together, and how many of them memory holds."""
    device, fitting = choose_device(runtime.device), size
    if device.type == "cpu":
        fitting = count_fitting_lanes(run, size, measure_free_memory() // workers)
    if fitting < 2:
        return LaneTime(obstacle="memory does not hold two"), 1
    with _share_memory(device, workers):
        return time_lanes(run, fitting, device, runtime.threads or 1), fitting


@contextmanager
def _share_memory(device: torch.device, workers: int) -> Iterator[None]:
    """Leave this process, in a `with` block, the share of a GPU's free memory that a worker has."""
    if device.type != "cuda":
        yield
        return
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(number)
    beside = -(-workers // torch.cuda.device_count())  # GPUs are dealt out in turns
    torch.cuda.set_per_process_memory_fraction(free / total / beside, number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, number)
        torch.cuda.empty_cache()
