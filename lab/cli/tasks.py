"""`lab tasks`: a table of all tasks."""

import json
from dataclasses import asdict

import typer

from lab.cli.output import AsJsonLines


def tasks(as_json: AsJsonLines = False) -> None:
    """List the tasks: what each tests, its sizes, chance, and how long a row takes to make here."""
    from lab.suite.survey import survey_tasks

    if as_json:
        for entry in survey_tasks():
            typer.echo(json.dumps(asdict(entry), ensure_ascii=False))
        return
    from lab.cli.console import open_table_console
    from lab.cli.tables.suite import build_suite_table

    console = open_table_console()
    console.print(build_suite_table(list(survey_tasks()), console.width))
