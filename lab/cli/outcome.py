"""Train a run to its end and show the outcome, as `lab TASK` and `lab resume` do."""

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.cli.messages import report_failures, report_usage_errors, say

if TYPE_CHECKING:
    from lab.config import Runtime
    from lab.training.run import Run


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
    from lab.cli.tables.progress import show_count, show_progress
    from lab.machine import keep_freed_memory
    from lab.training.evaluation import evaluate_settings
    from lab.training.experiment import carry_out

    keep_freed_memory()
    with report_failures(), report_usage_errors(), show_progress(run) as shown:
        before = run.read_result()
        result = carry_out(run, runtime, shown.on_plan, shown.on_row, shown.on_note)
    found = []
    if wanted and not result["signal"]:
        with report_failures():
            found = evaluate_settings(
                run, wanted, runtime.device, lambda text: say(f"evaluating {text}", err=True)
            )
            result = run.read_result() or result
    _show_result(result, found, as_json)
    if result["signal"]:
        say(
            f"`{run.resume_command}` goes on, as does the same command; `lab analyze {run.path}` "
            "writes a report.",
            err=True,
        )
        raise typer.Exit(128 + signal.Signals[result["signal"]])
    from analysis import QUICK
    from analysis.pages.report import write_quick
    from analysis.pages.report_files import find_page, is_complete

    notes: list[str] = []
    with report_failures():
        report = find_page(run) if result == before else None
        if report is None:
            with show_count(QUICK, "writing the report") as on_begin:
                report = write_quick(run, on_begin, notes.append).page
    for note in notes:
        say(note, err=True)
    _show_report(run.path, report, is_complete(run), as_json)


def show_finished(run: "Run", wanted: Mapping[str, Sequence[Any]], as_json: bool) -> bool:
    """Print what there is of a run that has ended and has all that is wanted of it.

    This touches no file, and does not import torch.

    Args:
        run: the run.
        wanted: values to evaluate at, by option of the task.
        as_json: print the result as JSON and nothing else.

    Returns:
        Whether it was printed. If not, `train_and_report` does what is missing, or says why not.
    """
    from lab.cli.command import list_keys
    from lab.files import RunError
    from lab.training.evaluation import list_evaluations, undo_json, vary_settings

    try:
        run.compare()
        result = run.read_final_result()
        covered = None if result is None else run.read_coverage(result["steps"])
    except RunError:
        return False
    page = run.path / "report.html"
    if result is None or covered is None or not page.is_file():
        return False
    entries = list_evaluations(result, result["steps"])
    asked = [(option, undo_json(value)) for option, value, _ in vary_settings(run, wanted)]
    if any(setting not in entries for setting in asked):
        return False
    _show_result(result, [entries[setting] for setting in asked], as_json)
    every = list_keys("analysis/__init__.py", "ANALYSES").split(", ")
    _show_report(run.path, page, covered >= {*every}, as_json)
    return True


def _show_result(result: dict[str, Any], found: list[dict[str, Any]], as_json: bool) -> None:
    """Print the result of a run, and its accuracy in other settings."""
    from lab.cli.console import open_console
    from lab.cli.tables.results import build_evaluations_table, build_result_table, describe_ending

    if as_json:
        typer.echo(json.dumps(result))
        return
    console = open_console()
    console.print(build_result_table(result))
    if found:
        console.print(build_evaluations_table(found))
    console.print(describe_ending(result))


def _show_report(run: Path, page: Path, complete: bool, as_json: bool) -> None:
    """Name the page of a run's report, and how to get all analyses where some are missing."""
    say(f"report: {page}", err=as_json)
    if not complete:
        say(f"For every analysis: `lab analyze {run}`", err=True)
