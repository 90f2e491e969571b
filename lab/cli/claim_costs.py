"""Measuring the settings of a claim about costs, and judging it by them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import typer

from lab.cli.messages import report_failures, report_usage_errors
from lab.cli.output import check_output
from lab.cli.sweep_options import SweepOptions

if TYPE_CHECKING:
    from analysis.claims.claim import Statistic
    from analysis.claims.verdict import ClaimVerdict
    from analysis.pages.page import Shown
    from lab.sweeps import Cell, Sweep


def judge_costs(
    sweep: "Sweep", statistic: "Statistic", options: SweepOptions
) -> tuple["ClaimVerdict", list[tuple[str, "Shown"]]]:
    """Measure the cells of a sweep, unless earlier costs are only shown, and judge them.

    Returns:
        the verdict, and the figures of its page.

    Errors of usage and of files are reported in one line, as commands do.
    """
    from analysis.claims.verdict import collect_costs, decide_costs
    from analysis.pages.page import show_finding
    from lab.sweeps.table import is_table, save_table

    def is_costs(file: Path) -> bool:
        return is_table(file, ("seq_len", "round", "cost"))

    file = options.table
    assert file is not None
    with report_usage_errors():
        _check(sweep, options)
        if options.show and not file.exists():
            raise ValueError(f"show: nothing has been measured yet: there is no {file}")
        check_output("out", file, options.force, is_costs)
    with report_failures():
        table = pl.read_parquet(file) if options.show else _measure(sweep, statistic)
        save_table(table, file)
        found = collect_costs(table, statistic.cost)
        return decide_costs(table, statistic), [("costs", show_finding(found, sweep.name))]


def _check(sweep: "Sweep", options: SweepOptions) -> None:
    for name, value in (("workers", options.workers), ("ray", options.ray)):
        if value is not None:
            raise ValueError(f"{name}={value}: costs are measured in one process, one at a time")
    if options.max_minutes is not None:
        raise ValueError(f"max_minutes={options.max_minutes:g}: nothing is trained")
    seeds = len({cell.factors["seed"] for cell in sweep.cells})
    if seeds > 1:
        raise ValueError(f"seeds={seeds}: must be 1, since costs are measured in rounds of turns")


def _measure(sweep: "Sweep", statistic: "Statistic") -> pl.DataFrame:
    """Return the costs of all cells; those of one place, such as a row length, take turns."""
    from lab.bench.costs import measure_costs
    from lab.cli.run_settings import read_settings

    assert statistic.cost
    compared = {*statistic.of, *statistic.than}
    places: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in sweep.cells:
        key = tuple(value for name, value in cell.factors.items() if name not in compared)
        places.setdefault(key, []).append(cell)
    rows = []
    for number, cells in enumerate(places.values(), 1):
        runs = [read_settings(cell.task, cell.options)[0] for cell in cells]
        typer.echo(f"measuring {len(cells)} settings, {number} of {len(places)} places", err=True)
        costs = measure_costs(runs, statistic.cost)
        for cell, run, taken in zip(cells, runs, costs, strict=True):
            factors = {name: v for name, v in cell.factors.items() if name != "seed"}
            at = {"seq_len": run.task.seq_len} | factors
            rows += [at | {"round": i, "cost": cost} for i, cost in enumerate(taken)]
    return pl.DataFrame(rows)
