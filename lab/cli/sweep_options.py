"""The options that `lab sweep`, `lab study` and `lab reproduce` share."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lab.cli.command import set_parameters
from lab.cli.output import Force

RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Train on a Ray cluster: HOST:PORT of its head node; auto, the cluster of this "
        "machine; or local, a new one on this machine.",
        show_default="this machine, without Ray",
    ),
]


def make_workers_option(default: str) -> Any:
    """Return the option --workers, given its default in words."""
    return typer.Option(
        help="Number of runs at the same time, each with one thread.", show_default=default
    )


def make_runs_option(default: str) -> Any:
    """Return the option --out of a command that trains runs, given its default in words."""
    return typer.Option(help="Folder of the runs; the same folder resumes.", show_default=default)


Workers = Annotated[int | None, make_workers_option("one for each core")]
MaxMinutes = Annotated[
    float | None,
    typer.Option(help="Maximum minutes that one run may take in total.", show_default="no limit"),
]


@dataclass(frozen=True)
class SweepOptions:
    """The options of every sweep."""

    out: Annotated[Path | None, make_runs_option("runs/NAME")] = None
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FACTOR=VALUE", help="Run only these settings; may be repeated."),
    ] = None
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Number of runs of each setting, each with its own seed.", show_default="3"
        ),
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="Precision of all runs.", show_default="fp32"),
    ] = None
    workers: Workers = None
    ray: RayAddress = None
    max_minutes: MaxMinutes = None
    table: Annotated[
        Path | None,
        typer.Option(
            help="Also write the table to this .csv or .parquet file after every run. Runs that it "
            "already shows as ended, with the same settings, are not repeated."
        ),
    ] = None
    figures: Annotated[
        Path | None,
        typer.Option(help="Also save every figure in this folder, as pages, .html."),
    ] = None
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Train all runs anew: remove what their folders hold first."),
    ] = False
    force: Force = False
    show: Annotated[
        bool,
        typer.Option("--show", help="Show the results so far; run nothing, change no table."),
    ] = False


def share_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of `SweepOptions` as an option; it gets them as `options`."""

    def run(**given: Any) -> None:
        shared = {f.name: given.pop(f.name) for f in fields(SweepOptions)}
        command(options=SweepOptions(**shared), **given)

    own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
    shared = fields(SweepOptions)
    annotations = {p.name: p.annotation for p in own} | {f.name: f.type for f in shared}
    defaults = {p.name: p.default for p in own} | {f.name: f.default for f in shared}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    set_parameters(run, annotations, defaults)
    return run
