"""`lab tasks`: the suite at a glance."""

import json
from dataclasses import asdict
from typing import Annotated

import typer


def tasks(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the tasks: what each separates, sizes, chance, and what a row costs here and now."""
    from lab.suite.survey import surveyed

    if as_json:
        for entry in surveyed():
            typer.echo(json.dumps(asdict(entry), ensure_ascii=False))
        return
    from rich.console import Console

    from lab.cli.tables.suite import suite_table

    console = Console(markup=False, highlight=False)
    console.print(suite_table(list(surveyed()), console.width))
