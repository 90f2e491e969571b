"""`lab bench`: measure every speed claim as a ratio of two times."""

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.bench import BENCHMARKS
from lab.cli.answers import refuse, report_failures, report_usage_errors
from lab.cli.output import Force, check_output

DRAWN = "scaling"
"""The benchmark that has a figure."""


def bench(
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Run only this benchmark: {', '.join(BENCHMARKS)}."),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="Compare each ratio with those of the same machine in this file, and add it."
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(help=f"Save the curves of {DRAWN} as this .html, .png or .svg file."),
    ] = None,
    force: Force = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Measure every speed claim as a ratio of two times, both taken in the same run."""
    from lab.bench import history as kept
    from lab.peers import MissingPeerError

    names: list[str] = [*BENCHMARKS] if only is None else [only]
    with report_failures(), report_usage_errors():
        if only is not None and only not in BENCHMARKS:
            raise ValueError(f"only={only}: must be one of {', '.join(BENCHMARKS)}")
        if figure is not None:
            _check_figure(figure, names, force)
        earlier = [] if history is None else kept.read(history)
    missed = False
    for name in names:
        try:
            ratios = import_module(f"lab.bench.{name}").measure()
        except MissingPeerError as error:
            raise refuse(error, 2) from error
        for ratio in ratios:
            missed |= not ratio.reached
            typer.echo(json.dumps(asdict(ratio)) if as_json else str(ratio))
            before = kept.compare(ratio, earlier)
            if before:
                typer.echo(f"  {before}", err=as_json)
        with report_failures():
            if history is not None:
                kept.append(history, ratios)
            if figure is not None and name == DRAWN:
                _draw(ratios, figure)
    if missed:
        raise typer.Exit(1)


def _check_figure(figure: Path, names: list[str], force: bool) -> None:
    """Check that a figure can be saved.

    Raises:
        ValueError: for benchmarks without one, another kind of file, or one that the lab did not
            make.
    """
    from analysis.pages.export import SUFFIXES

    if DRAWN not in names:
        raise ValueError(f"figure={figure}: only {DRAWN} has a figure: --only {DRAWN}")
    if figure.suffix.lower() not in SUFFIXES:
        raise ValueError(f"figure={figure}: must end in {', '.join(SUFFIXES)}")
    check_output("figure", figure, force)


def _draw(curves: list[Any], figure: Path) -> None:
    from analysis.pages.export import BrowserError, save
    from analysis.plots.style import add_title
    from analysis.studies.scaling import draw
    from lab.files import explain_write_errors
    from lab.machine.processor import describe_machine

    try:
        with explain_write_errors(figure):
            save(add_title(draw(curves), "Cost by size", describe_machine()), figure)
    except BrowserError as error:
        raise refuse(error, 2) from error
    typer.echo(figure, err=True)
