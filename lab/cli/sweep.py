"""Commands that train many runs: sweep, study, reproduce, claim."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.api.options import (
    ClaimOptions,
    GridOptions,
    ProfileOptions,
    ReproduceOptions,
    StudyOptions,
    SweepOptions,
)
from lab.cli.command import takes
from lab.cli.messages import report_failures, report_usage_errors, say
from lab.cli.task import RowOptions

if TYPE_CHECKING:
    import polars as pl

    from analysis.sweeps.results import SweepResults
    from lab.api.studies import StudyResult
    from lab.api.sweep_settings import SweepSettings
    from lab.sweeps import Sweep

OF_ONE_RUN = ("config", "evaluations", *(f.name for f in fields(RowOptions)))
"""Options of `lab TASK` that a sweep does not take."""


def _note(text: str) -> None:
    say(text, err=True)


@takes(GridOptions, others=True)
def sweep(options: GridOptions, words: Sequence[str]) -> None:
    """Train a model for each combination of values in a grid, several at a time.

    All other options of `lab TASK` are options of every run: --seq-len 64. Each run has its own
    folder. The same command resumes a sweep: runs that have ended are skipped, and others go on
    from their checkpoints. A run that fails stops no other.
    """
    from lab.api.sweep_settings import (
        SweepSettings,
        build_suite,
        read_file,
        read_grid,
        read_seeds,
    )
    from lab.api.sweeping import PAGE
    from lab.cli.tables.runs import build_settings_table
    from lab.cli.tables.suite import build_published_table
    from lab.console import open_table_console
    from lab.suite.suites import read_suite

    what, suite = options.what, None
    with report_usage_errors():
        if options.suite is not None:
            suite = read_suite(options.suite)
            # Without a task, the first word after an option is taken for one.
            words = [*filter(None, [what]), *words]
            known = suite.known[0].task
            grid = read_grid(known, options.grid) if options.grid else {}
            settings = SweepSettings(known, grid, _read_fixed(known, words))
        elif what is None:
            raise ValueError("name a task, a .toml file, or a --suite")
        elif what.endswith(".toml"):
            typed = [(word.lstrip("-"), word) for word in words if word.startswith("--")]
            for name, given in (("grid", options.grid), ("lengths", options.lengths), *typed):
                if given:
                    raise ValueError(f"--{name}: belongs in {what}, which describes the sweep")
            settings = read_file(Path(what))
        else:
            settings = _read_words(what, options.grid, options.lengths, words)
        if options.seeds is not None:
            settings = replace(settings, seeds=read_seeds(options.seeds))
        if options.precision is not None:
            settings = replace(settings, fixed={**settings.fixed, "precision": options.precision})
        if suite is None:
            built = settings.build()
        elif options.lengths:
            raise ValueError(f"--lengths: is set by the suite {suite.name}")
        else:
            built = build_suite(suite, settings.grid, settings.fixed, settings.seeds)
    table, found = run_shown(built, options)
    if suite is None:
        open_table_console().print(build_settings_table(found.settings))
    else:
        open_table_console().print(build_published_table(suite, found.settings, table["task"][0]))
    say(found.summarize())
    page = (options.out or Path("runs") / built.name) / PAGE
    if page.exists():  # it is written after the first run
        say(f"page: {page}")
    report_failed_runs(found)


def _read_words(
    task: str, grid: Sequence[str], lengths: str | None, words: Sequence[str]
) -> "SweepSettings":
    """Return the settings that the words of the command describe.

    Raises:
        ValueError: for an unknown task or option, or a value of another type.
    """
    from lab.api.sweep_settings import SweepSettings, parse_lengths, read_grid

    read = read_grid(task, grid)
    return SweepSettings(task, read, _read_fixed(task, words), lengths=parse_lengths(lengths))


def _read_fixed(task: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the options of `lab TASK` that the words give, by field.

    Raises:
        ValueError: for an option that the runs of a sweep do not have.
    """
    from lab.cli.app import build_task_command

    with build_task_command(task).make_context(f"lab {task}", list(words)) as parsed:
        given = {name: v for name, v in parsed.params.items() if v not in (None, (), [])}
        for name in ("as_json", "trust", "fresh"):  # a sweep has its own --fresh
            given.pop(name)
    for name in OF_ONE_RUN:
        if given.pop(name, False) is not False:
            raise ValueError(f"--{name.replace('_', '-')}: is for a single run, not for a sweep")
    layers = dict(text.partition("=")[::2] for text in given.pop("options", []))
    return given | layers


def run_shown(sweep: "Sweep", options: SweepOptions) -> "tuple[pl.DataFrame, SweepResults]":
    """Run a sweep, showing how far it is; return its table and its results."""
    from lab.api.progress import show_sweep
    from lab.api.sweeping import run_sweep

    with report_failures(), report_usage_errors():
        return run_sweep(sweep, options, show_sweep(), _note)


def report_failed_runs(found: "SweepResults") -> None:
    """Print the error of each run that has failed or diverged; exit with code 1 if one has failed.

    A run that diverged has ended: this is a result, and nothing that another try would change.
    """
    from lab.api.sweep_settings import join_some

    for error, names in found.errors.items():
        say(f"{error} ({join_some(names)})", err=True)
    if "failed" in found.counts:
        say("The same command tries the runs that failed again.", err=True)
        raise typer.Exit(1)


@takes(ReproduceOptions)
def reproduce(options: ReproduceOptions) -> None:
    """Reproduce a figure of the paper, and compare its numbers with ours."""
    from lab.api import studies
    from lab.api.progress import show_sweep
    from lab.cli.tables.suite import build_recall_table
    from lab.console import open_table_console

    with report_failures(), report_usage_errors():
        found = studies.reproduce(options, show_sweep(), _note)
    if found.settings:
        open_table_console().print(build_recall_table(found.settings))
    _show_study(found, options)


@takes(StudyOptions)
def study(options: StudyOptions) -> None:
    """Run one of the lab's own studies.

    trainability: what shortens the first stage of attention's training? trainability-ssd: what lets
    SSD begin to recall? capacity: how many pairs does the state of SSD hold?
    """
    from lab.api import studies
    from lab.api.progress import show_sweep

    with report_failures(), report_usage_errors():
        found = studies.study(options, show_sweep(), _note)
    if found.note:
        say(found.note)
    _show_study(found, options)


def _show_study(found: "StudyResult", options: StudyOptions | ReproduceOptions) -> None:
    """Print tables and sentences, and save the figure if one is asked for."""
    from lab.api.studies import save_study
    from lab.cli.tables.suite import build_numbers_table
    from lab.console import open_table_console

    for finding in found.findings:
        numbers = finding.numbers()
        if numbers is not None:
            open_table_console().print(build_numbers_table(numbers))
        say(finding.says)
    if found.left:
        say(f"Runs that have no result and are left out: {found.left} of {found.runs}.")
    if options.figure is not None:
        with report_failures(), report_usage_errors():
            save_study(found, options)
        say(options.figure)


@takes(ProfileOptions, json="Print the card as JSON.")
def profile(options: ProfileOptions, as_json: bool) -> None:
    """Find out what a mixer is good at: train it on each ability, and set it beside all others.

    Two layers of it recall, overwrite, copy, track a state and more. The card is a page and a JSON:
    each ability as a number with its interval, how the mixer recalls, what it costs, which laws it
    breaks, and a table to paste into a paper. The same command resumes.
    """
    from lab.api.profiling import make_profile
    from lab.api.progress import show_sweep
    from lab.cli.tables.suite import build_numbers_table
    from lab.console import open_table_console

    with report_failures(), report_usage_errors():
        found = make_profile(options, show_sweep, _note)
    if as_json:
        say(json.dumps(found.card.to_dict(), ensure_ascii=False))
    else:
        open_table_console().print(build_numbers_table(found.card.abilities.numbers()))
        say(found.card.summarize())
    say(f"card: {found.page}", err=as_json)


@takes(ClaimOptions, json="Print the card as JSON.")
def claim(options: ClaimOptions, as_json: bool) -> None:
    """Run or complete the sweep of a claim, and print whether the claim holds.

    The verdict is "holds", "fails" or "undecided", with an interval and the number of seeds. A run
    that fails or is missing leaves the claim undecided. The card, claim.json and claim.html, has
    digests of data, code and configuration.
    """
    from lab.api.claiming import judge, list_claims
    from lab.api.progress import show_sweep
    from lab.cli.tables.suite import build_claims_list
    from lab.console import open_table_console

    if options.listing:
        claims = list_claims()
        if as_json:
            for each in claims:
                say(json.dumps({"name": each.name, "claim": each.says, "scales": [*each.sweeps]}))
        else:
            open_table_console().print(build_claims_list(claims))
        return
    with report_failures(), report_usage_errors():
        found = judge(options, show_sweep, _note)
    say(json.dumps(found.card.to_dict()) if as_json else found.card.summarize())
    _note(f"card: {found.page}")
    if found.results is not None:
        report_failed_runs(found.results)
