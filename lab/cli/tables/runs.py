"""Tables of runs, for the terminal."""

from typing import Any

import polars as pl
from rich.table import Table


def build_runs_table(runs: pl.DataFrame) -> Table:
    """Return the most important columns of a table of runs."""
    chosen = runs.select("path", "task", "model", "accuracy", "steps", "seconds", "stopped")
    table = Table(box=None)
    for name in chosen.columns:
        table.add_column(name, overflow="fold", no_wrap=name != "path")
    for row in chosen.iter_rows():
        table.add_row(*map(_cell, row))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "—"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def build_comparison_table(runs: list[dict[str, Any]]) -> Table:
    """Return a table of compared runs, with numbers that the page of `lab compare` also has."""
    names = ("name", "model", "accuracy", "mechanism", "steps", "rows_per_second", "parameters")
    table = Table(box=None)
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for run in runs:
        table.add_row(*(_cell(run[name]) for name in names))
    return table
