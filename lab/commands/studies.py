"""`lab reproduce` and `lab study`: many runs that answer one question, and their table."""

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.commands.answers import answering, refusal, usage

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
    float | None, typer.Option(help="That a cell may take in all.", show_default="no limit")
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
    from lab.studies import recall

    with usage():
        _check_seeds(seeds)
        study = recall.study(seeds=seeds, learning_rates=learning_rate or (), precision=precision)
    _carry_out(study, out, only, workers, max_minutes, table, show)


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
    from lab.studies import trainability

    with usage():
        _check_seeds(seeds)
        chosen = trainability.study(seeds=seeds, precision=precision)
    _carry_out(chosen, out, only, workers, max_minutes, table, show)


def _check_seeds(seeds: int) -> None:
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: must be ≥ 1")


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
    from lab.files import write, writing
    from lab.studies.runner import carry_out
    from lab.studies.table import table

    with usage():
        study = study.only(only or [])
        if file is not None and file.suffix != ".csv":
            raise ValueError(f"table={file}: must end in .csv")
    out = out or Path("runs") / study.name

    def tabulate() -> Any:
        found = table(study, out)
        if file is not None:
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write(file, found.write_csv())
        return found

    number = 0

    def begin(cell: "Cell") -> None:
        typer.echo(f"{cell.name}: begins", err=True)

    def end(cell: "Cell", folder: "CellFolder") -> None:
        nonlocal number
        number += 1
        typer.echo(f"{number}/{len(study.cells)} {cell.name}: {ended(folder)}", err=True)
        tabulate()

    stopped: signal.Signals | None = None
    with answering():
        if not show:
            with usage():
                stopped = carry_out(
                    study,
                    out,
                    [sys.executable, "-m", "lab.commands.cell"],
                    workers=workers,
                    max_minutes=max_minutes,
                    on_begin=begin,
                    on_end=end,
                )
        found = tabulate()
    if stopped:
        raise refusal("interrupted; the same command resumes", 128 + stopped)
    return found


def ended(folder: "CellFolder") -> str:
    """Return in a few words how far a cell got."""
    status, error = folder.status(), folder.error()
    text = status if error is None else f"{status}, {error}"
    lengths = ", ".join(
        f"{found['test']:.3f} at {found['seq_len']:,}" for found in folder.lengths()
    )
    minutes = f"{folder.spent():.1f} min"
    return "; ".join(part for part in (text, lengths, minutes) if part)
