"""Sweeps: what `lab.sweep`, `lab sweep`, `lab TASK --seeds`, studies and claims share."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import polars as pl

from analysis.pages.export import save_all
from analysis.pages.page import draw_findings
from analysis.pages.sweep import render, write_page
from analysis.sweeps.results import SweepResults, collect_results
from lab.api.options import SweepOptions
from lab.api.progress import Display, SweepPlan, show_sweep
from lab.api.run import Page, TrainedRun
from lab.api.settings import Span, parse_assignments, read_settings
from lab.api.sweep_settings import SweepSettings, list_reasons, read_file, read_seeds, refuse_cells
from lab.files import RunError, check_output, explain_write_errors
from lab.lengthening import list_stages
from lab.machine import choose_device, count_cores
from lab.sweeps.outcome import is_finished, open_run, read_spent
from lab.sweeps.pool import CellRun, Worker, check_limits, open_workers, run_cells
from lab.sweeps.sweep import Cell, Sweep
from lab.sweeps.table import EarlierResults, check_file, save_table, tabulate_cells
from lab.training.experiment import try_out
from lab.training.run import OutError, Run
from tasks.schedule import Schedule

PAGE = "sweep.html"
"""The page of a sweep, in its folder."""
NO_OPTIONS = SweepOptions()


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
class SweepJob:
    """A sweep and how to run it.

    Attributes:
        sweep: the cells.
        out: the folder of the run folders.
        options: how to run them; `out`, `only`, `seeds` and `precision` have been heeded already.

    Raises:
        ValueError: for a table of another kind, workers below 1, or minutes not above 0.
    """

    sweep: Sweep
    out: Path
    options: SweepOptions = NO_OPTIONS

    def __post_init__(self):
        workers = self.options.workers
        check_limits(1 if workers is None else workers, self.options.max_minutes)
        if self.options.table is not None:
            check_file(self.options.table)

    def read_earlier(self) -> EarlierResults:
        """Return the results in the table, if there is one.

        Raises:
            RunError: for a file that is not a table of this sweep.
        """
        if self.options.table is None or not self.options.table.exists():
            return EarlierResults()
        settings = {
            cell.name: read_settings(cell.task, cell.options)[0].settings
            for cell in self.sweep.cells
        }
        return EarlierResults.read(self.options.table, self.sweep, settings)

    def count_ignored(self, earlier: EarlierResults) -> int:
        """Return how many ended runs of the table had other settings and are not in the folder."""
        return sum(not (self.out / name / "config.json").exists() for name in earlier.others)

    def tabulate(self, earlier: EarlierResults) -> pl.DataFrame:
        """Return the table of the runs so far.

        Raises:
            RunError: when a run cannot be read.
        """
        return tabulate_cells(self.sweep, self.out, earlier.rows)

    def write_table(self, earlier: EarlierResults) -> pl.DataFrame:
        """Return the table, and write it to its file if there is one.

        Rows of the file that belong to other cells stay in it, and all stay in their order.

        Raises:
            RunError: when a run cannot be read, or the file cannot be written.
        """
        found = self.tabulate(earlier)
        if self.options.table is not None:
            save_table(earlier.merge(found), self.options.table)
        return found

    def run(
        self,
        display: AbstractContextManager[Display] | None = None,
        earlier: EarlierResults | None = None,
    ) -> pl.DataFrame:
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
            plan = self._plan(earlier, self.options.workers or cpus, shown.on_note)
            shown.on_plan(plan)
            if plan.todo:
                with explain_write_errors(self.out):
                    self.out.mkdir(parents=True, exist_ok=True)

            def end(cell: Cell, error: str | None) -> None:
                shown.on_end(cell, error)
                if error is not None and read_spent(self.out / cell.name)[1] is None:
                    lost[cell.name] = error
                if self.options.table is not None:
                    self.write_table(earlier)

            workers = open_workers(min(plan.workers, len(plan.todo)), stop)
            stopped = run_cells(
                plan.todo,
                workers,
                stop,
                max_minutes=self.options.max_minutes,
                on_begin=shown.on_begin,
                on_end=end,
            )
        found = self.write_table(earlier)
        if stopped:
            raise InterruptedSweepError(stopped, self.options.fresh)
        if lost:
            count = f"{len(lost)} of {len(self.sweep.cells)} runs failed"
            raise RunError(f"{count}: {list_reasons(lost)}; the same command tries them again")
        return found

    @contextmanager
    def _open_site(
        self,
    ) -> Iterator[tuple[int, Callable[[int, threading.Event], Sequence[Worker]]]]:
        """Yield how many runs can train at a time, and what opens so many workers."""
        if self.options.ray is None:
            yield count_cores(), open_workers
            return
        from lab.sweeps.cluster import connect, open_cluster_workers

        on_cpu = all(cell.options.get("device") == "cpu" for cell in self.sweep.cells)
        with connect(self.options.ray) as cpus:
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
                if not self.options.fresh and self._has_ended(cell, run, earlier):
                    continue
                device = None if self.options.ray else choose_device(runtime.device)
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
        if self.options.fresh:
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
            return earlier.has_ended(cell) or is_finished(self.out, cell, self.options.max_minutes)
        except OutError:
            raise
        except RunError:  # damaged: training it will say so, and stop no other
            return False


def _describe_size(run: Run) -> str:
    """Return what decides whether a model can be built and trained."""
    stages = list_stages(run.task, run.train)
    sizes = [(stage.task.describe(), stage.batch_size) for stage in stages]
    return json.dumps([sizes, run.model.to_dict(), run.train.precision], sort_keys=True)


def run_sweep(
    sweep: Sweep,
    options: SweepOptions,
    display: AbstractContextManager[Display] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> tuple[pl.DataFrame, SweepResults]:
    """Run the unfinished cells, unless the sweep is only shown; return its table and its results.

    The sweep's page and its figures are written.

    Args:
        sweep: the cells, of which `options.only` selects.
        options: how to run them.
        display: shows how far it is; None: nothing is shown.
        on_note: called with a sentence on rows of the table that do not count.

    Raises:
        ValueError, RunError, InterruptedSweepError: as `SweepJob.run`; ValueError also for a file
            that the lab did not make.
    """
    sweep = sweep.select(options.only)
    out, figures = options.out or Path("runs") / sweep.name, options.figures
    check_output("out", out / PAGE, options.force)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise ValueError(f"figures={figures}: is a file, must be a folder")
    job = SweepJob(sweep, out, options)
    earlier = job.read_earlier()
    if ignored := job.count_ignored(earlier):
        on_note(
            f"table={options.table}: ended runs that do not count, as their settings are not this "
            f"sweep's: {ignored}; each stays until a run with this sweep's has ended"
        )
    if options.show:
        there = options.table is not None and options.table.exists()
        table = job.tabulate(earlier) if there else job.write_table(earlier)
    else:
        table = job.run(display, earlier)
    found = collect_results(table, sweep.factors)
    if set(found.counts) - {"not run"}:
        write_page(found, out.resolve().name, sweep.question, out / PAGE)
    if figures is not None:
        with explain_write_errors(figures):
            figures.mkdir(parents=True, exist_ok=True)
            drawn = {
                figures / f"{name}.html": fig
                for name, fig in draw_findings(found.findings, sweep.name).items()
            }
            for file in drawn:
                check_output("figures", file, options.force)
            save_all(drawn)
    return table, found


def build_seeds(task: str, count: int, given: Mapping[str, Any], known: Mapping[str, Any]) -> Sweep:
    """Return the sweep whose runs have these settings, and differ in the seed alone.

    Raises:
        ValueError: for a number of seeds out of its bounds, an option that only a single run has,
            or settings that no run can have.
    """
    seeds = read_seeds(count)
    if "log" in given:
        raise ValueError(f"--log={given['log']}: is for a single run; leave it out, or --seeds")
    for name, value in known.items():
        if isinstance(value, Schedule | Span) and name not in given:
            raise ValueError(f"--config: its {name} is a schedule; with --seeds give --{name}, too")
    # "auto" in a file is what a single run measures; the runs of a sweep must not differ in it.
    kept = {n: v for n, v in known.items() if (n, v) != ("precision", "auto") and v is not None}
    layers = {**kept.pop("options", {}), **parse_assignments(given.get("options", []))}
    mixed = {n: ",".join(map(str, v)) for n, v in kept.items() if isinstance(v, list | tuple)}
    fixed = {**kept, **mixed, **given, **layers}
    for name in ("seed", "options", "max_minutes"):
        fixed.pop(name, None)
    return SweepSettings(task, {}, fixed, seeds).build()


@dataclass(frozen=True)
class TrainedSweep:
    """A sweep that has been run; a notebook shows its page.

    Attributes:
        sweep: its cells.
        out: the folder of their run folders.
        table: a row for each run and row length.
    """

    sweep: Sweep
    out: Path
    table: pl.DataFrame

    @cached_property
    def results(self) -> SweepResults:
        """The settings with their intervals, and the figures that apply."""
        return collect_results(self.table, self.sweep.factors)

    @property
    def runs(self) -> dict[str, TrainedRun]:
        """The runs that there are, by the name of the cell."""
        found = {cell.name: open_run(self.out, cell) for cell in self.sweep.cells}
        return {name: TrainedRun(run) for name, run in found.items() if run is not None}

    def __repr__(self) -> str:
        lines = []
        for setting in self.results.settings:
            count = len(setting.seeds)
            seeds = f"{count} seed{'s' * (count != 1)}"
            lines.append(f"{setting.name()}: {setting.mean:.4f}, {seeds}")
        return "\n".join([self.results.summarize(), *lines])

    def _repr_html_(self) -> str:
        return Page(render(self.results, self.out.resolve().name), repr(self))._repr_html_()


def sweep(
    task: str | Path,
    grid: Mapping[str, Sequence[Any] | Mapping[str, Mapping[str, Any]]] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    out: Path | str | None = None,
    table: Path | str | None = None,
    workers: int | None = None,
    max_minutes: float | None = None,
    ray: str | None = None,
    lengths: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    fresh: bool = False,
    **settings: Any,
) -> TrainedSweep:
    """Train a model for each combination of values in a grid, several at a time.

    The same as the command `lab sweep`. Calling it again runs what has not ended.

    Args:
        task: its name, or a .toml file that describes the sweep.
        grid: values by option, such as {"d_model": [32, 64], "S.d_state": [16, 32]}; or named sets
            of options: {"mixer": {"attention": {"stack": "AM*2"}, "SSD": {"stack": "SM*2"}}}.
            None: runs that differ in the seed alone.
        seeds: how many runs of each setting, or their seeds; None: 3, or those of the file.
        out: the folder of the runs; None: one in runs/, named after the settings.
        table: also write the table to this .csv or .parquet file, and take ended runs from it.
        workers: runs at a time, each with one thread; None: one for each core.
        max_minutes: most minutes of a run in total.
        ray: address of a Ray cluster that trains them, HOST:PORT, "auto" or "local".
        lengths: row lengths at which each run is evaluated; none: that of the task.
        options: of layers, for all runs, such as {"S.d_state": 64}.
        fresh: train all runs anew, and remove those that the folders hold.
        settings: any other option of `lab TASK`, for all runs, such as seq_len=64.

    Raises:
        ValueError: for an unknown name, or runs that cannot be built; nothing is started then.
        RunError: when a folder cannot be used.
        InterruptedSweepError: when a signal stopped it; the same call goes on.
    """
    if str(task).endswith(".toml"):
        if grid or settings or options or lengths:
            raise ValueError(f"grid and options: belong in {task}, which describes the sweep")
        asked = read_file(Path(task))
    else:
        fixed = {**settings, **(options or {})}
        asked = SweepSettings(str(task), grid or {}, fixed, lengths=tuple(lengths))
    if seeds is not None:
        asked = replace(asked, seeds=read_seeds(seeds))
    built = asked.build()
    folder = Path("runs") / built.name if out is None else Path(out)
    how = SweepOptions(
        table=None if table is None else Path(table),
        workers=workers,
        max_minutes=max_minutes,
        ray=ray,
        fresh=fresh,
    )
    return TrainedSweep(built, folder, SweepJob(built, folder, how).run(show_sweep()))
