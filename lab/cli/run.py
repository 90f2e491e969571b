"""Commands on runs that there are: analyze, compare, runs, save-pretrained."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from lab.api.options import AnalyzeOptions, CompareOptions, make_force, make_trust
from lab.cli.command import takes
from lab.cli.messages import refuse, report_failures, report_usage_errors, say
from lab.files import check_output, escape_controls
from tasks.bounds import option

if TYPE_CHECKING:
    from lab.training.run import Run

HOME = Path("runs")
"""Where training commands put runs without --out; it is missing before the first."""


def _note(text: str) -> None:
    say(text, err=True)


@takes(AnalyzeOptions, json="Print only analysis.json.")
def analyze(options: AnalyzeOptions, as_json: bool) -> None:
    """Analyze what a run learned and how, and write analysis.json and report.html."""
    from lab.api import run as api

    with report_failures(), report_usage_errors():
        found = api.analyze(options, _note)
        numbers = json.loads(found.files.numbers.read_bytes())
    if as_json:
        typer.echo(json.dumps(numbers, ensure_ascii=False))
        return
    for name, findings in found.examination.results.items():
        for finding in findings[:1]:
            _note(f"{name}: {finding.says}")
    for name, reason in found.examination.not_applicable.items():
        _note(f"{name}: does not apply, {reason}")
    for file in (*found.figures, found.files.numbers, found.files.page):
        say(file)


@takes(CompareOptions, json="Print one JSON object.")
def compare(options: CompareOptions, as_json: bool) -> None:
    """Compare runs on one page: accuracy, mechanism, matrices, parameters, state, speed.

    Runs that differ in nothing but the seed are summarized, with intervals over seeds.
    """
    from analysis.plain import to_plain
    from lab.api import run as api
    from lab.cli.tables.runs import build_comparison_table
    from lab.console import open_table_console

    with report_failures(), report_usage_errors():
        found, page = api.compare(options, _note)
    if as_json:
        typer.echo(json.dumps(to_plain(found), ensure_ascii=False))
        return
    open_table_console().print(build_comparison_table(to_plain(found)["runs"]))
    for seeds in found.seeds:
        say(f"{', '.join(seeds.names)}: {seeds.summary.describe()}")
    say(page)


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Which runs to list."""

    root: Path = option(HOME, "The folder to search, including its subfolders.", argument=True)
    only: tuple[str, ...] = option(
        (),
        "List only runs with this value of an option or a column, e.g. task=mqar, d_model=64 or "
        "stopped=solved; may be repeated.",
        metavar="NAME=VALUE",
    )
    sort: Literal[
        "path", "task", "model", "accuracy", "chance", "steps", "seconds", "date", "stopped"
    ] = option("date", "Sort by this column, smallest first.")
    reverse: bool = option(False, "Sort the other way round.")
    table: Path | None = option(
        None, "Write a table of the runs, with all their options, to this .csv or .parquet file."
    )
    trust: bool = make_trust()
    force: bool = make_force()


@takes(RunsOptions, json="Print one JSON object per line.")
def runs(options: RunsOptions, as_json: bool) -> None:
    """List the runs below a folder: what was trained, when, and how it ended."""
    from lab.cli.tables.runs import build_runs_list
    from lab.console import open_console, open_table_console
    from lab.training.catalog import explain_none, find_runs, select_runs, tabulate

    root, only, console = options.root, options.only, open_console(stderr=True)
    with report_failures(), report_usage_errors():
        if root != HOME and not root.is_dir():
            raise ValueError(f"root={root}: there is no such folder")
        every = find_runs(
            root,
            lambda reason: console.print(f"left out: {escape_controls(reason)}"),
            trust=options.trust,
        )
        chosen = select_runs(every, only)
        found = tabulate(chosen).sort(options.sort, descending=options.reverse, nulls_last=True)
        if options.table is not None:
            _write_table(chosen, options.table, options.force)
    if as_json:
        typer.echo(found.write_ndjson(), nl=False)
    elif found.is_empty():
        say(f"no runs below {root}/" + (f" with {' '.join(only)}" if only and every else ""))
        known = explain_none(every, only) if every else ""
        if known:
            _note(f"There, {known}")
    else:
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


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Which model to save, and where."""

    path: Path = option(MISSING, "A run folder.", argument=True)
    folder: Path = option(MISSING, "The folder to write: new, or empty.", argument=True)
    step: int | None = option(None, "Save the weights after this step.", "the last")
    trust: bool = make_trust()


@takes(SaveOptions)
def save_pretrained(options: SaveOptions) -> None:
    """Save a run's model for Hugging Face's transformers.

    `AutoModelForCausalLM.from_pretrained` loads it after `import lab.huggingface`. Needs the extra
    `hf`.
    """
    from lab.peers import explain_missing
    from lab.training.run import Run

    missing = explain_missing("transformers")
    if missing is not None:
        raise refuse(missing, 2)
    from transformers.utils.logging import disable_progress_bar

    from lab.huggingface.saving import save_run

    disable_progress_bar()
    with report_failures(), report_usage_errors():
        save_run(Run.open(options.path, trust=options.trust), options.folder, options.step)
    say(options.folder)
