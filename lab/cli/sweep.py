"""`lab sweep`: a grid of runs, and the end that it shares with the lab's studies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.cli import rows
from lab.cli.messages import refuse, report_failures, report_usage_errors, say
from lab.cli.output import check_output
from lab.cli.sweep_options import SweepOptions, share_options

if TYPE_CHECKING:
    import polars as pl

    from analysis.sweeps.results import SweepResults
    from lab.cli.sweep_settings import SweepSettings
    from lab.sweeps import Sweep

PAGE = "sweep.html"
"""The page of a sweep, in its folder."""
OF_ONE_RUN = ("config", "evaluations", *rows.OPTIONS)
"""Options of `lab TASK` that a sweep does not take."""


@share_options
def sweep(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="TASK|FILE", help="A task, or a sweep as a .toml file.")
    ],
    options: SweepOptions,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,…",
            help="Values of an option of `lab TASK`, or of layers, such as S.d_state; if repeated, "
            "all combinations are run. A value that holds a comma is written in double quotes.",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="INT,…",
            help="Evaluate each run at these row lengths, which it passes on its way.",
            show_default="the task's",
        ),
    ] = None,
) -> None:
    """Train a model for each combination of values in a grid, several at a time.

    All other options of `lab TASK` are options of every run: --seq-len 64. Each run has its own
    folder. The same command resumes a sweep: runs that have ended are skipped, and others go on
    from their checkpoints. A run that fails stops no other.
    """
    from lab.cli.console import open_table_console
    from lab.cli.sweep_settings import read_file
    from lab.cli.tables.sweeps import build_settings_table

    with report_usage_errors():
        if what.endswith(".toml"):
            for name, given in (("grid", grid), ("lengths", lengths), *_name_words(context.args)):
                if given:
                    raise ValueError(f"--{name}: belongs in {what}, which describes the sweep")
            settings = read_file(Path(what))
        else:
            settings = _read_words(what, grid or [], lengths, context.args)
        built = _apply(settings, options).build()
    _, found = run_sweep(built, options)
    open_table_console().print(build_settings_table(found.settings))
    say(found.summarize())
    page = (options.out or Path("runs") / built.name) / PAGE
    if page.exists():  # it is written after the first run
        say(f"page: {page}")
    report_failed_runs(found)


def report_failed_runs(found: "SweepResults") -> None:
    """Print the error of each run that has failed or diverged; exit with code 1 if one has failed.

    A run that diverged has ended: this is a result, and nothing that another try would change.
    """
    from lab.cli.sweep_settings import join_some

    for error, names in found.errors.items():
        say(f"{error} ({join_some(names)})", err=True)
    if "failed" in found.counts:
        say("The same command tries the runs that failed again.", err=True)
        raise typer.Exit(1)


def _name_words(words: list[str]) -> list[tuple[str, str]]:
    return [(word.lstrip("-"), word) for word in words if word.startswith("--")]


def _read_words(
    task: str, grid: list[str], lengths: str | None, words: list[str]
) -> "SweepSettings":
    """Return the settings that the words of the command describe.

    Raises:
        ValueError: for an unknown task or option, or a value of another type.
    """
    from lab.cli.sweep_settings import SweepSettings, parse_lengths, read_grid

    read = read_grid(task, grid)
    return SweepSettings(task, read, _read_fixed(task, words), lengths=parse_lengths(lengths))


def _read_fixed(task: str, words: list[str]) -> dict[str, Any]:
    """Return the options of `lab TASK` that the words give, by field.

    Raises:
        ValueError: for an option that the runs of a sweep do not have.
    """
    from lab.cli.task_commands import build_task_command

    with build_task_command(task).make_context(f"lab {task}", list(words)) as parsed:
        given = {name: v for name, v in parsed.params.items() if v not in (None, (), [])}
        for name in ("as_json", "trust", "fresh"):  # a sweep has its own --fresh
            given.pop(name)
    for name in OF_ONE_RUN:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')}: is for a single run, not for a sweep")
    layers = dict(text.partition("=")[::2] for text in given.pop("options", []))
    return given | layers


def _apply(settings: "SweepSettings", options: SweepOptions) -> "SweepSettings":
    """Return settings with what the options of the command change."""
    from dataclasses import replace

    from lab.cli.sweep_settings import read_seeds

    if options.seeds is not None:
        settings = replace(settings, seeds=read_seeds(options.seeds))
    if options.precision is not None:
        settings = replace(settings, fixed={**settings.fixed, "precision": options.precision})
    return settings


def run_sweep(sweep: "Sweep", options: SweepOptions) -> "tuple[pl.DataFrame, SweepResults]":
    """Run the unfinished cells, unless the sweep is only shown; return its table and its results.

    The sweep's page and its figures are written.

    Errors of usage and of files are reported in one line, as commands do.
    """
    from analysis.sweeps.results import collect_results
    from lab.cli.sweeping import InterruptedSweepError, SweepJob
    from lab.cli.tables.sweep_progress import show_sweep

    with report_usage_errors():
        if options.fresh and options.show:
            raise ValueError("--fresh: has no effect with --show")
        sweep = sweep.select(options.only or [])
        out = options.out or Path("runs") / sweep.name
        check_output("out", out / PAGE, options.force)
        if (
            options.figures is not None
            and options.figures.exists()
            and not options.figures.is_dir()
        ):
            raise ValueError(f"figures={options.figures}: is a file, must be a folder")
        job = SweepJob(
            sweep,
            out,
            options.table,
            options.workers,
            options.max_minutes,
            options.ray,
            options.fresh,
        )
    with report_failures():
        earlier = job.read_earlier()
        if ignored := job.count_ignored(earlier):
            say(
                f"table={options.table}: ended runs that do not count, as their settings are not "
                f"this sweep's: {ignored}; each stays until a run with this sweep's has ended",
                err=True,
            )
        if options.show:
            there = options.table is not None and options.table.exists()
            table = job.tabulate(earlier) if there else job.write_table(earlier)
        else:
            with report_usage_errors():
                try:
                    table = job.run(show_sweep(), earlier)
                except InterruptedSweepError as stop:
                    raise refuse(stop, 128 + stop.signal) from stop
        found = collect_results(table, sweep.factors)
        _write_pages(found, sweep, out, options)
    return table, found


def _write_pages(found: "SweepResults", sweep: "Sweep", out: Path, options: SweepOptions) -> None:
    from analysis.pages.export import save_all
    from analysis.pages.page import draw_findings
    from analysis.pages.sweep import write_page
    from lab.files import explain_write_errors

    if set(found.counts) - {"not run"}:
        write_page(found, sweep.name, sweep.question, out / PAGE)
    if options.figures is not None:
        with explain_write_errors(options.figures):
            options.figures.mkdir(parents=True, exist_ok=True)
            drawn = {
                options.figures / f"{name}.html": fig
                for name, fig in draw_findings(found.findings, sweep.name).items()
            }
            with report_usage_errors():
                for file in drawn:
                    check_output("figures", file, options.force)
            save_all(drawn)
