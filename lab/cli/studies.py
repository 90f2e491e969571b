"""`lab reproduce` and `lab study`: many runs that answer one question, and their table."""

import signal
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.cli.answers import refuse, report_failures, report_usage_errors
from lab.cli.cell import COMMAND
from lab.cli.study_options import StudyOptions, share_options

if TYPE_CHECKING:
    from lab.studies import Cell, Study
    from lab.studies.folder import CellFolder


class Figure(StrEnum):
    """The tables and figures of the paper that can be reproduced."""

    recall = "recall"


class Question(StrEnum):
    """The lab's own studies."""

    trainability = "trainability"
    capacity = "capacity"


@share_options
def reproduce(
    name: Annotated[Figure, typer.Argument(help="Which table or figure.")],
    options: StudyOptions,
    learning_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Peak learning rate. If repeated, the best on validation rows counts.",
            show_default="the lab's",
        ),
    ] = None,
) -> None:
    """Reproduce a figure of the paper, and compare its numbers with ours."""
    from analysis.studies import recall as results
    from lab.cli.tables.studies import build_recall_table
    from lab.studies import recall

    with report_usage_errors():
        options.validate()
        for rate in learning_rate or ():
            if not 0 < rate < float("inf"):
                raise ValueError(f"learning_rate={rate}: must be > 0 and finite")
        study = recall.build_study(
            seeds=options.seeds, learning_rates=learning_rate or (), precision=options.precision
        )
    found = _run(study, options)
    settings = results.measure(found)
    said = results.summarize(settings, results.count_missing(found))
    _conclude(settings, said, build_recall_table, results.draw, options.figure, "Hard recall")


@share_options
def study(
    name: Annotated[Question, typer.Argument(help="Which study.")], options: StudyOptions
) -> None:
    """Run one of the lab's own studies.

    trainability: what shortens the first stage of training? capacity: how many pairs does the state
    of SSD hold?
    """
    from analysis.statistics.survival import MissingLibraryError, check_installed

    with report_usage_errors():
        options.validate()
    try:
        check_installed()
    except MissingLibraryError as error:
        raise refuse(error, 2) from error
    {Question.trainability: _study_trainability, Question.capacity: _study_capacity}[name](options)


def _study_trainability(options: StudyOptions) -> None:
    from analysis.studies import trainability as results
    from lab.cli.tables.studies import build_trainability_table
    from lab.studies.trainability import build_study

    found = _run(build_study(seeds=options.seeds, precision=options.precision), options)
    effects = results.measure(found)
    left = sum(status not in results.ENDED for status in found["status"])
    said, title = results.summarize(effects, left), "What shortens the first stage"
    _conclude(effects, said, build_trainability_table, results.draw, options.figure, title)


def _study_capacity(options: StudyOptions) -> None:
    from analysis.studies import capacity as results
    from lab.cli.tables.studies import build_capacity_table
    from lab.studies.capacity import build_study

    found = _run(build_study(seeds=options.seeds, precision=options.precision), options)
    states = results.measure(found)
    said = results.summarize(states, found["accuracy"].null_count())
    title = "How many pairs the state of SSD holds"
    _conclude(states, said, build_capacity_table, results.draw, options.figure, title)


def _conclude(
    measured: list[Any],
    said: list[str],
    build_table: Callable[[list[Any]], Any],
    draw: Callable[[list[Any]], Any],
    file: Path | None,
    title: str,
) -> None:
    """Print the table and the verdict, and save the figure if one is asked for."""
    from rich.console import Console

    if measured:
        Console(markup=False, highlight=False).print(build_table(measured))
    typer.echo("\n".join(said))
    if file is None:
        return
    if not measured:
        raise refuse(f"figure={file}: no run has ended yet, so there is nothing to draw", 2)
    from analysis.pages.export import BrowserError, save
    from analysis.plots.style import add_title
    from lab.files import explain_write_errors

    with report_failures():
        try:
            with explain_write_errors(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                save(add_title(draw(measured), title, said[0]), file)
        except BrowserError as error:
            raise refuse(error, 2) from error
    typer.echo(file)


def _run(study: "Study", options: StudyOptions) -> Any:
    """Run the unfinished cells, unless the study is only shown, and return the table."""
    from lab.files import explain_write_errors, write
    from lab.studies.earlier import EarlierResults
    from lab.studies.runner import run_cells
    from lab.studies.table import tabulate_cells

    file, earlier = options.table, EarlierResults({})
    with report_usage_errors():
        study = study.select(options.only or [])
        if file is not None and file.suffix != ".csv":
            raise ValueError(f"table={file}: must end in .csv")
    out = options.out or Path("runs") / study.name
    if file is not None and file.exists():
        with report_failures():
            earlier = EarlierResults.read(file, study, _read_settings(study))

    def tabulate() -> Any:
        found = tabulate_cells(study, out, earlier.rows)
        if file is not None:
            with explain_write_errors(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write(file, found.write_csv())
        return found

    number = 0

    def begin(cell: "Cell") -> None:
        typer.echo(f"{cell.name}: started", err=True)

    def end(cell: "Cell", folder: "CellFolder") -> None:
        nonlocal number
        number += 1
        typer.echo(f"{number}/{len(study.cells)} {cell.name}: {describe_cell(folder)}", err=True)
        tabulate()

    stopped: signal.Signals | None = None
    with report_failures():
        if not options.show:
            with report_usage_errors():
                stopped = run_cells(
                    study,
                    out,
                    COMMAND,
                    workers=options.workers,
                    max_minutes=options.max_minutes,
                    skip=earlier.has_ended,
                    on_begin=begin,
                    on_end=end,
                )
        found = tabulate()
    if stopped:
        raise refuse("interrupted; run the same command again to resume", 128 + stopped)
    return found


def _read_settings(study: "Study") -> dict[str, str]:
    """Return what identifies the settings of each cell's run, by the cell's name."""
    from lab.cli.run_settings import read_settings

    return {
        cell.name: read_settings(cell.task, dict(cell.options))[0].settings for cell in study.cells
    }


def describe_cell(folder: "CellFolder") -> str:
    """Describe in a few words how far a cell got."""
    from lab.training.endings import name_ending

    status, error = folder.find_status(), folder.read_error()
    ending = name_ending(status)
    text = ending if error is None else f"{ending}, {error}"
    lengths = ", ".join(
        f"{found['test']:.3f} at {found['seq_len']:,}" for found in folder.read_lengths()
    )
    minutes = f"{folder.read_minutes():.1f} min"
    return "; ".join(part for part in (text, lengths, minutes) if part)
