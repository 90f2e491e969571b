"""`lab runs`: a table of the runs below a folder."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lab.cli.messages import report_failures, report_usage_errors, say
from lab.cli.output import AsJsonLines, Force, check_output
from lab.cli.trust_option import Trust
from lab.files import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from lab.training.run import Run

Column = Literal[
    "path", "task", "model", "accuracy", "chance", "steps", "seconds", "date", "stopped"
]


HOME = Path("runs")
"""Where training commands put runs without --out; it is missing before the first."""


def runs(
    root: Annotated[
        Path, typer.Argument(help="The folder to search, including its subfolders.")
    ] = HOME,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="List only runs with this value of an option or a column, e.g. task=mqar, "
            "d_model=64 or stopped=solved; may be repeated.",
        ),
    ] = None,
    sort: Annotated[Column, typer.Option(help="Sort by this column, smallest first.")] = "date",
    reverse: Annotated[bool, typer.Option("--reverse", help="Sort the other way round.")] = False,
    table: Annotated[
        Path | None,
        typer.Option(
            help="Write a table of the runs, with all their options, to this .csv or .parquet file."
        ),
    ] = None,
    trust: Trust = False,
    force: Force = False,
    as_json: AsJsonLines = False,
) -> None:
    """List the runs below a folder: what was trained, when, and how it ended."""
    from lab.cli.console import open_console, open_table_console
    from lab.training.catalog import explain_none, find_runs, select_runs, tabulate

    with report_failures(), report_usage_errors():
        if root != HOME and not root.is_dir():
            raise ValueError(f"root={root}: there is no such folder")
        tell = partial(_say_left_out, console=open_console(stderr=True))
        every = find_runs(root, tell, trust=trust)
        chosen = select_runs(every, only or [])
        found = tabulate(chosen).sort(sort, descending=reverse, nulls_last=True)
        if table is not None:
            _write_table(chosen, table, force)
    if as_json:
        typer.echo(found.write_ndjson(), nl=False)
    elif found.is_empty():
        say(f"no runs below {root}/" + (f" with {' '.join(only)}" if only and every else ""))
        known = explain_none(every, only or []) if every else ""
        if known:
            say(f"There, {known}", err=True)
    else:
        from lab.cli.tables.runs import build_runs_list

        open_table_console().print(build_runs_list(found), crop=False)


def _write_table(runs: Sequence["Run"], file: Path, force: bool) -> None:
    """Write the tidy table of runs.

    Raises:
        ValueError: for a file of another kind, or one that is not such a table, unless forced.
        RunError: when it cannot be written.
    """
    from lab.sweeps.table import check_file, is_table, save_table, tabulate_runs

    check_file(file)
    check_output("table", file, force, is_table)
    save_table(tabulate_runs(runs), file)
    say(file, err=True)


def _say_left_out(reason: str, console: "Console") -> None:
    console.print(f"left out: {escape_controls(reason)}")
