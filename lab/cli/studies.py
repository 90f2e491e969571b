"""`lab reproduce` and `lab study`: many runs that answer one question, and their table."""

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.cli.answers import refuse, report_failures, report_usage_errors

if TYPE_CHECKING:
    from lab.studies import Cell, Study
    from lab.studies.folder import CellFolder

Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the cells; the same again resumes.", show_default="runs/NAME"),
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="FACTOR=VALUE", help="Only these cells; again for more."),
]
Seeds = Annotated[int, typer.Option(help="Runs of each setting.")]
Workers = Annotated[int, typer.Option(help="Cells at a time, each with one thread.")]
MaxMinutes = Annotated[
    float | None,
    typer.Option(help="Minutes that a cell may take in total.", show_default="no limit"),
]
Precision = Annotated[str, typer.Option(help="Of all runs: fp32 or bf16.")]
TableFile = Annotated[
    Path | None, typer.Option("--table", help="Write the table here too, after every cell: .csv.")
]
FigureFile = Annotated[Path | None, typer.Option(help="Draw the figure: .html, .png or .svg.")]
Show = Annotated[bool, typer.Option("--show", help="Run nothing; show what there is.")]


class Figure(StrEnum):
    """The tables and figures of the paper that can be reproduced."""

    recall = "recall"


class Question(StrEnum):
    """The lab's own studies."""

    trainability = "trainability"


def reproduce(
    name: Annotated[Figure, typer.Argument(help="Which table or figure.")],
    out: Out = None,
    only: Only = None,
    seeds: Seeds = 3,
    learning_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Peak learning rate; of several, the best on validation rows counts.",
            show_default="the lab's",
        ),
    ] = None,
    precision: Precision = "fp32",
    workers: Workers = 1,
    max_minutes: MaxMinutes = None,
    table: TableFile = None,
    figure: FigureFile = None,
    show: Show = False,
) -> None:
    """Reproduce a table or figure of the paper: its numbers beside ours, with a verdict."""
    from analysis.studies import recall as results
    from lab.cli.tables.studies import build_recall_table
    from lab.studies import recall

    with report_usage_errors():
        _validate(seeds, precision, figure)
        study = recall.build_study(
            seeds=seeds, learning_rates=learning_rate or (), precision=precision
        )
    found = _carry_out(study, out, only, workers, max_minutes, table, show)
    settings = results.measure(found)
    said = results.verdict(settings, results.missing(found))
    if settings:
        _print(build_recall_table(settings))
    _conclude(said, results.draw(settings) if figure else None, figure, "Hard recall")


def study(
    name: Annotated[Question, typer.Argument(help="Which study.")],
    out: Out = None,
    only: Only = None,
    seeds: Seeds = 3,
    precision: Precision = "fp32",
    workers: Workers = 1,
    max_minutes: MaxMinutes = None,
    table: TableFile = None,
    figure: FigureFile = None,
    show: Show = False,
) -> None:
    """Run one of the lab's own studies: trainability, what shortens the first stage of training."""
    from analysis.studies import trainability as results
    from lab.cli.tables.studies import build_trainability_table
    from lab.studies import trainability

    with report_usage_errors():
        _validate(seeds, precision, figure)
        chosen = trainability.build_study(seeds=seeds, precision=precision)
    try:
        results.check_installed()
    except results.MissingLibraryError as error:
        raise refuse(error, 2) from error
    found = _carry_out(chosen, out, only, workers, max_minutes, table, show)
    effects = results.measure(found)
    left = sum(status not in results.ENDED for status in found["status"])
    if effects:
        _print(build_trainability_table(effects))
    drawn = results.draw(effects) if figure else None
    _conclude(results.verdict(effects, left), drawn, figure, "What shortens the first stage")


def _validate(seeds: int, precision: str, figure: Path | None) -> None:
    """Validate what all studies are given.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    from analysis.pages.export import SUFFIXES

    if seeds < 1:
        raise ValueError(f"seeds={seeds}: must be ≥ 1")
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision={precision}: must be fp32 or bf16, the same for all runs")
    if figure is not None and figure.suffix.lower() not in SUFFIXES:
        raise ValueError(f"figure={figure}: must end in {', '.join(SUFFIXES)}")


def _print(table: Any) -> None:
    from rich.console import Console

    Console(markup=False, highlight=False).print(table)


def _conclude(said: list[str], drawn: Any, file: Path | None, title: str) -> None:
    """Print the verdict, and save the figure where one is asked for."""
    typer.echo("\n".join(said))
    if file is None:
        return
    from analysis.pages.export import BrowserError, save
    from analysis.plots.style import add_title
    from lab.files import explain_write_errors

    with report_failures():
        try:
            with explain_write_errors(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                save(add_title(drawn, title, said[0]), file)
        except BrowserError as error:
            raise refuse(error, 2) from error
    typer.echo(file)


def _carry_out(
    study: "Study",
    out: Path | None,
    only: list[str] | None,
    workers: int,
    max_minutes: float | None,
    file: Path | None,
    show: bool,
) -> Any:
    """Run the cells that are left, unless they are only shown, and return the table."""
    from lab.files import explain_write_errors, write
    from lab.studies.runner import run_cells
    from lab.studies.table import tabulate_cells

    with report_usage_errors():
        study = study.select(only or [])
        if file is not None and file.suffix != ".csv":
            raise ValueError(f"table={file}: must end in .csv")
    out = out or Path("runs") / study.name

    def tabulate() -> Any:
        found = tabulate_cells(study, out)
        if file is not None:
            with explain_write_errors(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write(file, found.write_csv())
        return found

    number = 0

    def begin(cell: "Cell") -> None:
        typer.echo(f"{cell.name}: begins", err=True)

    def end(cell: "Cell", folder: "CellFolder") -> None:
        nonlocal number
        number += 1
        typer.echo(f"{number}/{len(study.cells)} {cell.name}: {describe_cell(folder)}", err=True)
        tabulate()

    stopped: signal.Signals | None = None
    with report_failures():
        if not show:
            with report_usage_errors():
                stopped = run_cells(
                    study,
                    out,
                    [sys.executable, "-m", "lab.cli.cell"],
                    workers=workers,
                    max_minutes=max_minutes,
                    on_begin=begin,
                    on_end=end,
                )
        found = tabulate()
    if stopped:
        raise refuse("interrupted; the same command resumes", 128 + stopped)
    return found


def describe_cell(folder: "CellFolder") -> str:
    """Return in a few words how far a cell got."""
    status, error = folder.find_status(), folder.read_error()
    text = status if error is None else f"{status}, {error}"
    lengths = ", ".join(
        f"{found['test']:.3f} at {found['seq_len']:,}" for found in folder.read_lengths()
    )
    minutes = f"{folder.read_minutes():.1f} min"
    return "; ".join(part for part in (text, lengths, minutes) if part)
