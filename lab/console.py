"""What a training run shows while it goes and when it ends. Progress goes to stderr."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import polars as pl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lab.anatomy import Anatomy, Part
from lab.errata.erratum import Erratum
from lab.experiment import AUDIT_ROWS, Plan
from lab.paper import Compared
from lab.runs import Run
from lab.train import Row

MEASURED_STEPS = range(4, 13)
"""Steps of a session whose median time tells the cost: past the warm-up, few enough to wait for."""
ROOM_FOR_A_BAR = 110
"""Columns of a terminal from which there is room for more than numbers."""
RECENT_STEPS = 50
"""Steps whose median time is the speed shown."""


@contextmanager
def watching(run: Run) -> Iterator[tuple[Callable[[Plan], None], Callable[[Row], None]]]:
    """Show a plan, the cost measured on the first steps, and a live bar; yields the two callbacks.

    Without a terminal the bar is left out and each evaluation prints a line.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    columns = [MofNCompleteColumn(), TextColumn("{task.description}", markup=False)]
    if console.width >= ROOM_FOR_A_BAR:
        columns[1:1] = [BarColumn(bar_width=None)]
    bar = Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
    )
    last_step = run.train.max_steps
    shown = bar.add_task("", total=last_step, visible=False)
    first: list[float] = []
    recent: deque[float] = deque(maxlen=RECENT_STEPS)
    test = ""

    def on_plan(plan: Plan) -> None:
        model = run.model.model or run.model.stack
        console.print(
            f"{run.task.name}: {model}, {plan.parameters:,} parameters, on {plan.device} in "
            f"{plan.precision}, {run.train.optimizer}, {run.train.batch_size} rows a step; "
            f"kept in {run.path}"
        )
        if plan.first_step:
            console.print(f"resuming after step {plan.first_step:,}")
        bar.update(shown, completed=plan.first_step, visible=True)

    def on_row(row: Row) -> None:
        nonlocal test
        recent.append(row.seconds)
        steps_left = last_step - row.step
        if len(first) < MEASURED_STEPS.stop:
            first.append(row.seconds)
            if len(first) == MEASURED_STEPS.stop:
                console.print(_cost(first, steps_left))
        each = median(recent)
        if row.test_accuracy is not None:
            test = f"  test {row.test_accuracy:.3f}"
        text = (
            f"loss {row.loss:.3f}  accuracy {row.accuracy:.3f}{test}  "
            f"{run.train.batch_size / each:,.0f} rows/s  ≤ {duration(steps_left * each)}"
        )
        bar.update(shown, completed=row.step, description=text)
        if not console.is_terminal and row.test_accuracy is not None:
            console.print(f"step {row.step:,}  {text}")

    with bar:
        yield on_plan, on_row


@contextmanager
def counting(names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Show a live bar over things done one after the other; yields what is told each beginning."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        shown = bar.add_task("", total=len(names), completed=-1)

        def on_begin(name: str) -> None:
            bar.update(shown, advance=1, description=name)

        yield on_begin
        bar.update(shown, completed=len(names), description="done")


def _cost(times: list[float], steps_left: int) -> str:
    each = median(times[i] for i in MEASURED_STEPS)
    return (
        f"{1000 * each:,.0f} ms a step measured: the {steps_left:,} steps left take at most "
        f"{duration(each * steps_left)}, evaluation apart; Ctrl-C stops, the same command resumes"
    )


def duration(seconds: float) -> str:
    """Return a length of time in the two units that matter: "3 d 4 h", "2 min 5 s"."""
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for i, (name, size) in enumerate(units[:-1]):
        if seconds >= size:
            finer, unit = units[i + 1]
            return f"{seconds // size:.0f} {name} {seconds % size // unit:.0f} {finer}"
    return f"{seconds:.0f} s"


def runs_table(runs: pl.DataFrame) -> Table:
    """Return what matters most of a table of runs, for the terminal."""
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


def comparison_table(runs: list[dict[str, Any]]) -> Table:
    """Return runs beside each other, as `lab compare` puts them in its page."""
    names = ("name", "model", "accuracy", "mechanism", "steps", "rows_per_second", "parameters")
    table = Table(box=None)
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for run in runs:
        table.add_row(*(_cell(run[name]) for name in names))
    return table


def result_table(result: dict[str, Any]) -> Table:
    """Return the accuracy beside the oracle, the shortcuts and chance, best first."""
    scores = {"this model": result["accuracy"], **result["baselines"]}
    by_hand = result.get("set_by_hand") or {}
    if by_hand.get("accuracy") is not None:
        scores["this model, set by hand"] = by_hand["accuracy"]
    table = Table(
        title=f"{result['task']}: test accuracy",
        title_justify="left",
        caption=f"rules: first {AUDIT_ROWS} test rows",
    )
    table.add_column("")
    table.add_column("accuracy", justify="right")
    for name, value in sorted(scores.items(), key=lambda score: -(score[1] or 0.0)):
        style = "bold" if name == "this model" else ""
        table.add_row(name, "—" if value is None else f"{value:.4f}", style=style)
    return table


def evaluations_table(found: list[dict[str, Any]]) -> Table:
    """Return the accuracy at settings beyond training, each with its 95 % interval."""
    table = Table(title="beyond training: test accuracy", title_justify="left")
    for name in ("", "accuracy", "95 %", "chance", "rows"):
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


def ending(result: dict[str, Any]) -> str:
    """Return how a run ended, in a line, and why no weights set by hand solve it, in another."""
    line = (
        f"{result['stopped']} after {result['steps']:,} steps, {result['rows']:,} rows, "
        f"{duration(result['seconds'])} of training ({result['rows_per_second'] or 0:,.0f} rows/s)"
    )
    by_hand = result.get("set_by_hand")
    if by_hand is None or by_hand["verdict"] == "solves":
        return line
    return f"{line}\nweights set by hand, {by_hand['verdict']}: {by_hand['because']}"


def anatomy_table(found: Anatomy) -> Table:
    """Return a model's parts from tokens to logits, alike neighbours in one row."""
    table = Table(box=None)
    for name in ("blocks", "part", ""):
        table.add_column(name, no_wrap=name == "part")
    for name in ("parameters each", "active"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(where: str, part: Part) -> None:
        table.add_row(where, part.name, part.note, f"{part.parameters:,}", f"{part.active:,}")

    add("", found.embedding)
    first = 0
    for run in found.unit:
        last = first + run.times - 1
        where = str(first) if first == last else f"{first}–{last}"
        for part in (run.pair.mixer, run.pair.transform):
            if part is not None:
                add(where, part)
                where = ""
        first += run.times
    add("", found.head)
    if found.times > 1:
        whole = "block 0 stands" if first == 1 else f"blocks 0–{first - 1} stand"
        table.caption = f"{whole} {found.times} times in a row"
    return table


def count_line(found: Anatomy, compared: Compared | None) -> str:
    """Return a model's totals in words, beside the paper's where it has one."""
    line = f"total {found.total:,} parameters, {found.active:,} of them active for a token"
    if compared is None:
        return line
    return f"{line}\nthe paper's {compared.size}: {compared.difference:+.2%}; {compared.because}"


def erratum_table(erratum: Erratum) -> Table:
    """Return what running an erratum gave: each reading, its evidence, and how to train it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    mark = "✓" if erratum.confirmed else "✗"
    table.add_row(f"{mark} {erratum.row}", erratum.where, style="bold")
    for name, said, evidence, option in (
        ("printed", erratum.printed, erratum.printed_evidence, erratum.printed_option),
        ("meant", erratum.meant, erratum.meant_evidence, erratum.meant_option),
    ):
        table.add_row(f"  {name}", said)
        table.add_row("", f"→ {evidence}")
        if option is not None:
            table.add_row("", option, style="dim")
    if erratum.note:
        table.add_row("  note", erratum.note)
    table.add_row()
    return table
