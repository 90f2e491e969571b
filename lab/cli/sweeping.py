"""Running a sweep: what `lab sweep`, `lab study`, `lab reproduce` and `lab.sweep` share."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lab.cli.run_settings import read_settings
from lab.cli.sweep_settings import list_reasons, refuse_cells
from lab.files import RunError, explain_write_errors
from lab.lengthening import list_stages
from lab.machine import choose_device, count_cores
from lab.sweeps.outcome import is_finished, open_run, read_spent
from lab.sweeps.pool import CellRun, Worker, check_limits, open_workers, run_cells
from lab.sweeps.sweep import Cell, Sweep
from lab.sweeps.table import EarlierResults, check_file, save_table, tabulate_cells
from lab.training.experiment import try_out
from lab.training.run import OutError, Run

if TYPE_CHECKING:
    import polars as pl


class InterruptedSweepError(Exception):
    """A signal stopped a sweep; the same command goes on.

    Attributes:
        signal: its number.
    """

    def __init__(self, signal: int, fresh: bool = False):
        without = "without --fresh " * fresh
        super().__init__(f"interrupted; run the same command again {without}to resume")
        self.signal = signal


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is about to do.

    Attributes:
        cells: how many cells there are.
        todo: the runs that have not ended.
        workers: runs at a time.
        out: the folder of the run folders.
    """

    cells: int
    todo: Sequence[CellRun]
    workers: int
    out: Path


class Display:
    """Shows a sweep while it runs; this one shows nothing."""

    def on_note(self, text: str) -> None:
        """Show what is done before the first run."""

    def on_plan(self, plan: SweepPlan) -> None:
        """Show what is about to be done."""

    def on_begin(self, cell: Cell) -> None:
        """Show that a cell begins."""

    def on_end(self, cell: Cell, error: str | None) -> None:
        """Show that a cell has ended."""


@dataclass(frozen=True)
class SweepJob:
    """A sweep and how to run it.

    Attributes:
        sweep: the cells.
        out: the folder of the run folders.
        table: also write the table to this file, and take ended runs from it; None: no file.
        workers: runs at a time; None: one for each core, of this machine or the cluster.
        max_minutes: most minutes of a run in total; None: no limit.
        ray: address of the Ray cluster that trains them; None: this machine does.
        fresh: train all runs anew, and remove those that their folders hold.

    Raises:
        ValueError: for a table of another kind, workers below 1, or minutes not above 0.
    """

    sweep: Sweep
    out: Path
    table: Path | None = None
    workers: int | None = None
    max_minutes: float | None = None
    ray: str | None = None
    fresh: bool = False

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
            return EarlierResults()
        settings = {
            cell.name: read_settings(cell.task, cell.options)[0].settings
            for cell in self.sweep.cells
        }
        return EarlierResults.read(self.table, self.sweep, settings)

    def count_ignored(self, earlier: EarlierResults) -> int:
        """Return how many ended runs of the table had other settings and are not in the folder."""
        return sum(open_run(self.out / name) is None for name in earlier.others)

    def tabulate(self, earlier: EarlierResults) -> "pl.DataFrame":
        """Return the table of the runs so far.

        Raises:
            RunError: when a run cannot be read.
        """
        return tabulate_cells(self.sweep, self.out, earlier.rows)

    def write_table(self, earlier: EarlierResults) -> "pl.DataFrame":
        """Return the table, and write it to its file if there is one.

        Rows of the file that belong to other cells stay in it, and all stay in their order.

        Raises:
            RunError: when a run cannot be read, or the file cannot be written.
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
        """Train the runs that have not ended, and return the table.

        Args:
            display: shows how far it is; None: nothing is shown.
            earlier: the results in the table, if they have been read; None: they are read.

        Raises:
            ValueError: for runs that cannot be built; they are named, and nothing is started. Or
                when the cluster is not there or refuses the token.
            RunError: when a file cannot be read or written, also one in which a run's error would
                be kept.
            InterruptedSweepError: when a signal stopped it.
        """
        earlier, lost, stop = earlier or self.read_earlier(), {}, threading.Event()
        with self._open_site() as (cpus, open_workers), display or nullcontext(Display()) as shown:
            plan = self._plan(earlier, self.workers or cpus, shown.on_note)
            shown.on_plan(plan)
            if plan.todo:
                with explain_write_errors(self.out):
                    self.out.mkdir(parents=True, exist_ok=True)

            def end(cell: Cell, error: str | None) -> None:
                shown.on_end(cell, error)
                if error is not None and read_spent(self.out / cell.name)[1] is None:
                    lost[cell.name] = error
                if self.table is not None:
                    self.write_table(earlier)

            workers = open_workers(min(plan.workers, len(plan.todo)), stop)
            stopped = run_cells(
                plan.todo,
                workers,
                stop,
                max_minutes=self.max_minutes,
                on_begin=shown.on_begin,
                on_end=end,
            )
        found = self.write_table(earlier)
        if stopped:
            raise InterruptedSweepError(stopped, self.fresh)
        if lost:
            count = f"{len(lost)} of {len(self.sweep.cells)} runs failed"
            raise RunError(f"{count}: {list_reasons(lost)}; the same command tries them again")
        return found

    @contextmanager
    def _open_site(
        self,
    ) -> Iterator[tuple[int, Callable[[int, threading.Event], Sequence[Worker]]]]:
        """Yield how many runs can train at a time, and what opens so many workers."""
        if self.ray is None:
            yield count_cores(), open_workers
            return
        from lab.sweeps.cluster import connect, open_cluster_workers

        on_cpu = all(cell.options.get("device") == "cpu" for cell in self.sweep.cells)
        with connect(self.ray) as cpus:
            yield cpus, partial(open_cluster_workers, gpus=not on_cpu)

    def _plan(
        self, earlier: EarlierResults, workers: int, on_note: Callable[[str], None]
    ) -> SweepPlan:
        """Find the runs that have not ended, and try a model of each size.

        Raises:
            ValueError: for runs that cannot be built, or whose folder holds another run.
        """
        if (self.out / "config.json").exists():
            raise ValueError(f"out={self.out}: holds a single run; choose another --out")
        total, todo, errors = len(self.sweep.cells), [], {}
        sizes: dict[str, str | None] = {}
        for cell in self.sweep.cells:
            path = self.out / cell.name
            try:
                run, runtime = read_settings(cell.task, cell.options, path)
                if not self.fresh and self._has_ended(cell, run, earlier):
                    continue
                device = None if self.ray else choose_device(runtime.device)
            except (OutError, ValueError) as error:
                errors[cell.name] = str(error)
                continue
            todo.append(CellRun(cell, run, runtime))
            size = _describe_size(run)
            if size not in sizes:
                on_note(f"trying size {len(sizes) + 1}: {cell.name}")
                sizes[size] = None
                try:
                    try_out(run, device)
                except ValueError as error:
                    sizes[size] = str(error)
            if (error := sizes[size]) is not None:
                errors[cell.name] = error
        refuse_cells(errors, total)
        if self.fresh:
            for each in todo:
                try:
                    each.run.begin_anew()
                except RunError as error:
                    errors[each.cell.name] = str(error)
            refuse_cells(errors, total)
        return SweepPlan(total, todo, workers, self.out)

    def _has_ended(self, cell: Cell, run: Run, earlier: EarlierResults) -> bool:
        """Whether the run of a cell has ended, here or in the table.

        Raises:
            OutError: when the folder holds another run, or its own mixer's code has changed.
        """
        try:
            if (run.path / "config.json").exists():
                run.compare()
            return earlier.has_ended(cell) or is_finished(run.path, cell.lengths, self.max_minutes)
        except OutError:
            raise
        except RunError:  # damaged: training it will say so, and stop no other
            return False


def _describe_size(run: Run) -> str:
    """Return what decides whether a model can be built and trained."""
    stages = list_stages(run.task, run.train)
    sizes = [(stage.task.describe(), stage.batch_size) for stage in stages]
    return json.dumps([sizes, run.model.to_dict(), run.train.precision], sort_keys=True)
