"""Tables of runs, for the terminal."""

from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from lab.cli.tables.durations import format_duration
from lab.training.records import name_ending

LINE = "{:>8}  {:>7}  {:>7}  {:>11}  {:16}  {}"
COMPARED = "{:>8}  {:>7}  {:>7}  {:>12}  {:10}  {}"


def build_runs_list(runs: pl.DataFrame) -> Group:
    """Return a line of numbers for each run, and below it how it ended and what was trained."""
    header = Text(LINE.format("accuracy", "chance", "steps", "time", "date", "run"), "bold")
    parts: list[RenderableType] = [header]
    for run in runs.iter_rows(named=True):
        scores = [_cell(run[name], ".4f") for name in ("accuracy", "chance")]
        time = "—" if run["seconds"] is None else format_duration(run["seconds"])
        line = LINE.format(*scores, _cell(run["steps"], ","), time, run["date"][:16], run["path"])
        parts.append(Text(line, no_wrap=True, overflow="ignore"))
        ending = name_ending(run["stopped"])
        trained = f"{ending}: {run['task']}, {run['model']}, {run['options']}"
        parts.append(Padding(Text(trained, "dim"), (0, 0, 0, 4)))
    return Group(*parts)


def _cell(value: object, form: str = "") -> str:
    if value is None:
        return "—"
    return f"{value:{form or '.4g'}}" if form or isinstance(value, float) else str(value)


def build_comparison_table(runs: list[dict[str, Any]]) -> Group:
    """Return a line for each compared run, with numbers that the page of `lab compare` also has."""
    forms = {"accuracy": ".4f", "steps": ",", "rows_per_second": ",.0f", "parameters": ","}
    header = COMPARED.format("accuracy", "steps", "rows/s", "parameters", "mechanism", "run")
    lines = [Text(header, "bold")]
    for run in runs:
        cells = [_cell(run[name], form) for name, form in forms.items()]
        named = f"{run['name']} ({run['model']})"
        line = COMPARED.format(*cells, _cell(run["mechanism"]), named)
        lines.append(Text(line, no_wrap=True, overflow="ignore"))
    return Group(*lines)
