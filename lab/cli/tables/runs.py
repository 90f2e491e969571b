"""Tables of runs: one run's result, several runs, seeds, and the settings of a sweep."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lab.api.results import format_accuracy, format_duration, list_scores, name_measure
from lab.config import AUDIT_ROWS
from lab.training.records import name_ending

if TYPE_CHECKING:
    import polars as pl

    from analysis.sweeps.seeds import SeedSummary
    from analysis.sweeps.settings import SettingResult

LINE = "{:>8}  {:>7}  {:>7}  {:>11}  {:16}  {}"
COMPARED = "{:>8}  {:>7}  {:>7}  {:>12}  {:>11}  {:10}  {}"


def build_result_table(result: dict[str, Any]) -> Table:
    """Return a table of the accuracies of model, construction, oracle, shortcuts and chance."""
    measure = name_measure(result)
    table = Table(
        title=f"{result['task']}: test {measure}",
        title_justify="left",
        caption=f"chance, shortcuts and oracle: on the first {AUDIT_ROWS} test rows",
    )
    table.add_column("")
    table.add_column(measure, justify="right")
    for name, value in list_scores(result):
        style = "bold" if name == "this model" else ""
        table.add_row(name, format_accuracy(value), style=style)
    return table


def build_evaluations_table(found: list[dict[str, Any]], measure: str) -> Table:
    """Return a table of the accuracy in other settings, each with its 95 % interval."""
    table = Table(title=f"beyond training: test {measure}", title_justify="left")
    for name in ("", measure, "95 %", "chance", "rows"):
        table.add_column(name, justify="left" if not name else "right")
    for entry in found:
        where = f"{entry['option']}={entry['value']}"
        if "error" in entry:
            table.add_row(where, entry["error"])
            continue
        low, high = entry["interval"]
        table.add_row(
            where,
            f"{entry['accuracy']:.4f}",
            f"{low:.4f} … {high:.4f}",
            f"{entry['chance']:.4f}",
            f"{entry['rows']:,}",
        )
    return table


def build_runs_list(runs: "pl.DataFrame") -> Group:
    """Return a line of numbers for each run, and below it how it ended and what was trained."""
    header = Text(LINE.format("accuracy", "chance", "steps", "time", "date", "run"), "bold")
    parts: list[RenderableType] = [header]
    for run in runs.iter_rows(named=True):
        scores = [_cell(run[name], ".4f") for name in ("accuracy", "chance")]
        time = "—" if run["seconds"] is None else format_duration(run["seconds"])
        line = LINE.format(*scores, _cell(run["steps"], ","), time, run["date"][:16], run["path"])
        parts.append(Text(line, no_wrap=True, overflow="ignore"))
        ending = name_ending(run["stopped"])
        own = f" ({run['model']})" if run["model"] else ""
        measure = name_measure(run)
        task = run["task"] + (f" ({measure})" if measure != "accuracy" else "")
        trained = f"{ending}: {task}, {run['stack']}{own}, {run['options']}"
        parts.append(Padding(Text(trained, "dim"), (0, 0, 0, 4)))
    return Group(*parts)


def _cell(value: object, form: str = "") -> str:
    if value is None:
        return "—"
    return f"{value:{form or '.4g'}}" if form or isinstance(value, float) else str(value)


def build_comparison_table(runs: list[dict[str, Any]]) -> Group:
    """Return a line for each compared run, with numbers that the page of `lab compare` also has."""
    forms = {"accuracy": ".4f", "steps": ",", "rows_per_second": ",.0f", "parameters": ","}
    names = ("accuracy", "steps", "rows/s", "parameters", "state bytes", "mechanism", "run")
    header = COMPARED.format(*names)
    lines = [Text(header, "bold")]
    for run in runs:
        cells = [_cell(run[name], form) for name, form in forms.items()]
        cells.append(_cell(run["state_size"]["bytes"], ","))
        named = f"{run['name']} ({run['model']})"
        line = COMPARED.format(*cells, _cell(run["mechanism"]), named)
        lines.append(Text(line, no_wrap=True, overflow="ignore"))
    return Group(*lines)


def build_seeds_table(found: "SeedSummary") -> Table:
    """Return a line for each seed: its accuracy and interval over rows, steps, and its ending."""
    table = Table(box=None, title="test accuracy by seed", title_justify="left")
    for name in ("seed", "accuracy", "95 %", "steps", "time", "ended"):
        table.add_column(name, justify="left" if name == "ended" else "right")
    for run in found.runs:
        table.add_row(
            str(run.seed),
            format_accuracy(run.accuracy),
            "" if run.low is None else f"{run.low:.4f} … {run.high:.4f}",
            "" if run.steps is None else f"{'' if run.solved else '> '}{run.steps:,}",
            "" if run.seconds is None else format_duration(run.seconds),
            name_ending(run.status),
        )
    return table


def build_settings_table(settings: Sequence["SettingResult"]) -> Table:
    """Return a line for each setting: its factors, accuracy and interval, its costs."""
    table = Table(box=None, title="mean test accuracy over seeds", title_justify="left")
    factors = list(settings[0].factors) if settings else []
    numbers = ("accuracy", "95 %", "seeds", "solved", "steps", "seconds", "state bytes")
    for name in (*factors, *numbers):
        table.add_column(name, justify="right")
    for setting in settings:
        values = [
            f"{value:g}" if isinstance(value, float) else str(value)
            for value in setting.factors.values()
        ]
        if not setting.seeds:
            table.add_row(*values, "no result", "", f"0 of {setting.unended}", *[""] * 4)
            continue
        count = len(setting.seeds)
        low, high = setting.interval
        table.add_row(
            *values,
            f"{setting.mean:.4f}",
            f"{low:.4f} … {high:.4f}",
            str(count) if not setting.unended else f"{count} of {count + setting.unended}",
            f"{sum(setting.solved)} of {count}",
            f"{sum(setting.steps) / count:,.0f}",
            f"{sum(setting.seconds) / count:,.0f}",
            _cell(setting.state_bytes, ","),
        )
    return table
