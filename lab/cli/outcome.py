"""Train a run to its end and show the outcome, as `lab TASK` and `lab resume` do."""

import json
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from lab.cli.answers import report_failures

if TYPE_CHECKING:
    from lab.config import Runtime
    from lab.training.runs import Run


def train_and_report(
    run: "Run", runtime: "Runtime", wanted: Mapping[str, Sequence[Any]], as_json: bool
) -> None:
    """Train, evaluate at further settings, print the result, and write the report.

    Args:
        run: what to train; a finished run is only shown.
        runtime: device, minutes, logger.
        wanted: values to evaluate at, by option of the task.
        as_json: print the result as JSON and nothing else.
    """
    from lab.cli.console import open_console
    from lab.cli.tables.progress import show_count, show_progress
    from lab.cli.tables.results import build_evaluations_table, build_result_table, describe_ending
    from lab.machine.memory import keep_freed_memory
    from lab.training.experiment import carry_out
    from lab.training.generalisation import evaluate_settings

    keep_freed_memory()
    with report_failures(), show_progress(run, runtime.max_minutes) as shown:
        before = run.read_result()
        result = carry_out(run, runtime, shown.on_plan, shown.on_row, shown.on_note)
    found = []
    if wanted and not result["signal"]:
        with report_failures():
            found = evaluate_settings(
                run, wanted, runtime.device, lambda text: typer.echo(f"evaluating {text}", err=True)
            )
            result = run.read_result() or result
    if as_json:
        typer.echo(json.dumps(result))
    else:
        console = open_console()
        console.print(build_result_table(result))
        if found:
            console.print(build_evaluations_table(found))
        console.print(describe_ending(result))
    if result["signal"]:
        typer.echo(
            f"`lab resume {run.path}` goes on, as does the same command; `lab analyze {run.path}` "
            "writes a report.",
            err=True,
        )
        raise typer.Exit(128 + signal.Signals[result["signal"]])
    from analysis import QUICK
    from analysis.pages.kept import find_page, is_complete
    from analysis.pages.report import write_quick

    with report_failures():
        report = find_page(run) if result == before else None
        if report is None:
            with show_count(QUICK, "writing the report") as on_begin:
                report = write_quick(run, on_begin).page
    typer.echo(f"report: {report}", err=as_json)
    if not is_complete(run):
        typer.echo(f"For every analysis: `lab analyze {run.path}`", err=True)
