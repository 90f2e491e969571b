"""A grid of runs in one line: `lab.sweep("mqar", {"d_model": [32, 64]}, seeds=3)`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from analysis.pages.sweep import render
from analysis.sweeps.results import SweepResults, collect_results
from lab.cli.sweep_settings import SweepSettings, read_file, read_seeds
from lab.cli.sweeping import SweepJob
from lab.cli.tables.sweep_progress import show_sweep
from lab.notebook.page import Page
from lab.notebook.trained_run import TrainedRun
from lab.sweeps import Sweep
from lab.sweeps.outcome import open_run


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
        found = {cell.name: open_run(self.out / cell.name) for cell in self.sweep.cells}
        return {name: TrainedRun(run) for name, run in found.items() if run is not None}

    def __repr__(self) -> str:
        lines = []
        for setting in self.results.settings:
            count = len(setting.seeds)
            seeds = f"{count} seed{'s' * (count != 1)}"
            lines.append(f"{setting.name()}: {setting.mean:.4f}, {seeds}")
        return "\n".join([self.results.summarize(), *lines])

    def _repr_html_(self) -> str:
        return Page(render(self.results, self.sweep.name), repr(self))._repr_html_()


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
    file = None if table is None else Path(table)
    job = SweepJob(built, folder, file, workers, max_minutes, ray, fresh)
    return TrainedSweep(built, folder, job.run(show_sweep()))
