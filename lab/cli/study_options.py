"""The options that `lab reproduce` and `lab study` share."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lab.cli.command import set_parameters

MOST_SEEDS = 1_000


@dataclass(frozen=True)
class StudyOptions:
    """The options of every study."""

    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs; the same folder resumes the study.", show_default="runs/NAME"
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FACTOR=VALUE", help="Run only these settings; may be repeated."),
    ] = None
    seeds: Annotated[
        int, typer.Option(help="Number of runs of each setting, each with its own seed.")
    ] = 3
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Precision of all runs.")] = (
        "fp32"
    )
    workers: Annotated[
        int, typer.Option(help="Number of runs at the same time, each with one thread.")
    ] = 1
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Most minutes that one run may take in total.", show_default="no limit"),
    ] = None
    table: Annotated[
        Path | None,
        typer.Option(
            help="Also write the table to this .csv file after every run. Runs that it already "
            "shows as ended, with the same settings, are not repeated."
        ),
    ] = None
    figure: Annotated[
        Path | None, typer.Option(help="Save the figure as this .html, .png or .svg file.")
    ] = None
    show: Annotated[
        bool, typer.Option("--show", help="Show the results so far and run nothing.")
    ] = False

    def validate(self) -> None:
        """Check the options that do not depend on the study.

        Raises:
            ValueError: naming the option, its value and its bound.
        """
        from analysis.pages.export import SUFFIXES

        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ValueError(f"seeds={self.seeds}: must be in 1 … {MOST_SEEDS:,}")
        if self.figure is not None and self.figure.suffix.lower() not in SUFFIXES:
            raise ValueError(f"figure={self.figure}: must end in {', '.join(SUFFIXES)}")


def share_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of `StudyOptions` as an option; it gets them as `options`."""

    def run(**given: Any) -> None:
        shared = {f.name: given.pop(f.name) for f in fields(StudyOptions)}
        command(options=StudyOptions(**shared), **given)

    own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
    shared = fields(StudyOptions)
    annotations = {p.name: p.annotation for p in own} | {f.name: f.type for f in shared}
    defaults = {p.name: p.default for p in own} | {f.name: f.default for f in shared}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    set_parameters(run, annotations, defaults)
    return run
