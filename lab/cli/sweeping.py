"""Running a sweep: what `lab sweep`, `lab study`, `lab reproduce` and `lab.sweep` share."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lab.cli.cell import COMMAND, claim_run
from lab.cli.run_settings import read_settings
from lab.cli.sweep_settings import list_reasons, refuse_cells
from lab.files import RunError, explain_write_errors
from lab.machine.device import choose_device
from lab.machine.processor import count_cores
from lab.sweeps.cost import RunCost, TimeLeft, find_size, time_run
from lab.sweeps.earlier import EarlierResults
from lab.sweeps.folder import CellFolder
from lab.sweeps.lanes import LanePlan, choose_lanes
from lab.sweeps.runner import check_limits, is_finished, run_cells
from lab.sweeps.sweep import Cell, Sweep
from lab.sweeps.table import check_file, save_table, tabulate_cells
from lab.sweeps.workers import Trainer, start_processes
from lab.training.experiment import try_out
from lab.training.loggers import check_installed

if TYPE_CHECKING:
    import polars as pl


class InterruptedSweepError(Exception):
    """A signal stopped a sweep; the same command goes on.

    Attributes:
        signal: its number.
    """

    def __init__(self, signal: int):
        super().__init__("interrupted; run the same command again to resume")
        self.signal = signal


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is about to do.

    Attributes:
        cells: how many cells there are.
        workers: cells at a time.
        costs: of the cells to do, by name.
        left: estimates the time left.
        lanes: which of them compute together.
    """

    cells: int
    workers: int
    costs: Mapping[str, RunCost]
    left: TimeLeft
    max_minutes: float | None
    out: Path
    lanes: LanePlan


class Display:
    """Shows a sweep while it runs; this one shows nothing."""

    def on_note(self, text: str) -> None:
        """Show what is done before the first run."""

    def on_plan(self, plan: SweepPlan) -> None:
        """Show what is about to be done."""

    def on_begin(self, cell: Cell) -> None:
        """Show that a cell begins."""

    def on_end(self, cell: Cell, folder: CellFolder, error: str | None) -> None:
        """Show that a cell has ended."""

    def on_wait(self) -> None:
        """Show how far the running cells are."""


class TrainingSite(NamedTuple):
    """Where cells are trained.

    Attributes:
        cpus: how many cells at a time unless the user says otherwise.
        start: what `run_cells` takes.
    """

    cpus: int
    start: Callable[[int, threading.Event], Sequence[Trainer]]


@dataclass(frozen=True)
class SweepJob:
    """A sweep and how to run it.

    Attributes:
        sweep: the cells.
        out: the folder of their folders.
        table: also write the table to this file, and take ended cells from it; None: no file.
        workers: cells at a time; None: one for each core, of this machine or the cluster.
        max_minutes: most minutes of a cell in total; None: no limit.
        lanes: whether cells may compute together, where that is faster.
        ray: address of the Ray cluster that trains them; None: this machine does.

    Raises:
        ValueError: for a table of another kind, workers below 1, or minutes not above 0.
    """

    sweep: Sweep
    out: Path
    table: Path | None = None
    workers: int | None = None
    max_minutes: float | None = None
    lanes: bool = True
    ray: str | None = None

    def __post_init__(self):
        check_limits(1 if self.workers is None else self.workers, self.max_minutes)
        if self.table is not None:
            check_file(self.table)

    def read_earlier(self) -> EarlierResults:
        """Return the results in the table, if there is one.

        Raises:
            RunError: for a file that is not a table of this sweep.
        """
        if self.table is None or not self.table.exists():
            return EarlierResults({})
        settings = {
            cell.name: read_settings(cell.task, cell.options)[0].settings
            for cell in self.sweep.cells
        }
        return EarlierResults.read(self.table, self.sweep, settings)

    def count_ignored(self, earlier: EarlierResults) -> int:
        """Return how many ended runs of the table had other settings and are not in the folder."""
        return sum(CellFolder(self.out / name).open_run() is None for name in earlier.others)

    def tabulate(self, earlier: EarlierResults) -> "pl.DataFrame":
        """Return the table of the runs so far.

        Raises:
            RunError: when a cell cannot be read.
        """
        return tabulate_cells(self.sweep, self.out, earlier.rows)

    def write_table(self, earlier: EarlierResults) -> "pl.DataFrame":
        """Return the table, and write it to its file if there is one.

        Rows of the file that belong to other cells stay in it, and all stay in their order.

        Raises:
            RunError: when a cell cannot be read, or the file cannot be written.
        """
        found = self.tabulate(earlier)
        if self.table is not None:
            save_table(earlier.merge(found), self.table)
        return found

    def run(
        self,
        display: AbstractContextManager[Display] | None = None,
        earlier: EarlierResults | None = None,
    ) -> "pl.DataFrame":
        """Run the unfinished cells and return the table.

        Args:
            display: shows how far it is; None: nothing is shown.
            earlier: the results in the table, if they have been read; None: they are read.

        Raises:
            ValueError: for cells that cannot be built; they are named, and nothing is started. Or
                when the cluster is not there or refuses the token.
            RunError: when a file cannot be read or written, also one in which a cell's error would
                be kept.
            InterruptedSweepError: when a signal stopped it.
        """
        earlier, lost = earlier or self.read_earlier(), {}
        with self._open_site() as site, display or nullcontext(Display()) as shown:
            plan = self._plan(earlier.has_ended, self.workers or site.cpus, shown.on_note)
            shown.on_plan(plan)
            if plan.costs:
                with explain_write_errors(self.out):
                    self.out.mkdir(parents=True, exist_ok=True)

            def end(cell: Cell, folder: CellFolder, error: str | None) -> None:
                shown.on_end(cell, folder, error)
                if error is not None and folder.read_error() is None:
                    lost[cell.name] = error
                if self.table is not None and cell.name in plan.costs:
                    self.write_table(earlier)

            stopped = run_cells(
                self.sweep,
                self.out,
                site.start,
                groups=plan.lanes.groups,
                workers=min(plan.workers, len(plan.lanes.groups)),
                max_minutes=self.max_minutes,
                skip=earlier.has_ended,
                on_begin=shown.on_begin,
                on_end=end,
                on_wait=shown.on_wait,
            )
        found = self.write_table(earlier)
        if stopped:
            raise InterruptedSweepError(stopped)
        if lost:
            count = f"{len(lost)} of {len(self.sweep.cells)} runs failed"
            raise RunError(f"{count}: {list_reasons(lost)}; the same command tries them again")
        return found

    @contextmanager
    def _open_site(self) -> Iterator[TrainingSite]:
        """Yield where cells are trained."""
        if self.ray is None:
            yield TrainingSite(count_cores(), partial(start_processes, COMMAND))
            return
        from lab.sweeps.connection import connect

        on_cpu = all(cell.options.get("device") == "cpu" for cell in self.sweep.cells)
        with connect(self.ray) as cluster:
            start = partial(cluster.start, COMMAND[1:], claim_run, gpus=not on_cpu)
            yield TrainingSite(cluster.cpus, start)

    def _plan(
        self, skip: Callable[[Cell], bool], workers: int, on_note: Callable[[str], None]
    ) -> SweepPlan:
        """Build a model of each size, and time a step.

        Raises:
            ValueError: for cells that cannot be built, or whose folder holds another cell.
        """
        cells = self.sweep.cells
        todo = [
            cell
            for cell in cells
            if not skip(cell)
            and not is_finished(cell, CellFolder(self.out / cell.name), self.max_minutes)
        ]
        known: dict[str, RunCost | str] = {}
        sizes, costs, errors = {}, {}, {}
        for cell in cells:
            try:
                CellFolder(self.out / cell.name).check(cell)
            except RunError as error:
                errors[cell.name] = str(error)
        refuse_cells(errors, len(cells))
        for cell in todo:
            try:
                run, runtime = read_settings(cell.task, cell.options)
                check_installed(runtime.log)
                choose_device(runtime.device)
                size = sizes[cell.name] = find_size(run)
            except ValueError as error:
                errors[cell.name] = str(error)
                continue
            if size not in known:
                on_note(f"timing a step of size {len(known) + 1}: {cell.name}")
                try:
                    try_out(run)
                    known[size] = time_run(run, runtime.device, runtime.threads or 1)
                except ValueError as error:
                    known[size] = str(error)
            found = known[size]
            if isinstance(found, str):
                errors[cell.name] = found
            else:
                costs[cell.name] = found
        refuse_cells(errors, len(cells))
        by_size = {sizes[name]: cost for name, cost in costs.items()}
        left = TimeLeft(sizes, by_size, workers, self.max_minutes)
        lanes = LanePlan(tuple((cell,) for cell in cells))
        if self.lanes and self.max_minutes is None and costs:  # minutes limit each run
            described = {cell.name: read_settings(cell.task, cell.options) for cell in cells}
            lanes = choose_lanes(cells, described, list(costs), workers, on_note)
        return SweepPlan(len(cells), workers, costs, left, self.max_minutes, self.out, lanes)


def describe_cell(folder: CellFolder, error: str | None) -> str:
    """Describe in a few words how far a cell got."""
    from lab.training.endings import name_ending

    ending = name_ending(folder.find_status())
    text = ending if error is None else f"{ending}, {error}"
    lengths = ", ".join(
        f"{found['test']:.3f} at {found['seq_len']:,}" for found in folder.read_lengths()
    )
    return "; ".join(part for part in (text, lengths, f"{folder.read_minutes():.1f} min") if part)
