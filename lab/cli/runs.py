"""`lab runs`: a table of the runs below a folder."""

from pathlib import Path
from typing import Annotated

import typer

from lab.cli.answers import report_failures


def runs(
    root: Annotated[
        Path, typer.Argument(help="The folder to search, including its subfolders.")
    ] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """List the runs below a folder: what was trained and how it ended."""
    from rich.console import Console

    from lab.training.catalog import find_runs, tabulate

    with report_failures():
        found = tabulate(find_runs(root))
    if as_json:
        typer.echo(found.write_ndjson(), nl=False)
    elif found.is_empty():
        typer.echo(f"no runs below {root}")
    else:
        from lab.cli.tables.runs import build_runs_table

        Console(markup=False).print(build_runs_table(found))
