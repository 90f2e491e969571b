"""`lab bench`: measure every speed claim as a ratio of two times."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.bench import BENCHMARKS
from lab.cli.figures import check_figure, make_figure_option, save_figure
from lab.cli.messages import refuse, report_failures, report_usage_errors
from lab.cli.output import AsJsonLines, Force
from lab.machine.spinning import choose_wait
from tasks.bounds import check_choice

if TYPE_CHECKING:
    from lab.bench.ratio import Ratio

FURTHER = {"memory": ["analysis.memory_bench"]}
"""Modules above `lab.bench` in the order of imports that measure more of a benchmark."""
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
    figure: Annotated[Path | None, make_figure_option(f"the curves of {DRAWN}")] = None,
    force: Force = False,
    as_json: AsJsonLines = False,
) -> None:
    """Measure every speed claim as a ratio of two times, both taken in the same run.

    Estimates of memory are compared with what is taken.
    """
    from lab.bench import history as kept
    from lab.peers import MissingPeerError

    names: list[str] = [*BENCHMARKS] if only is None else [only]
    with report_failures(), report_usage_errors():
        if only is not None:
            check_choice("only", only, BENCHMARKS)
        if figure is not None:
            if DRAWN not in names:
                raise ValueError(f"figure={figure}: only {DRAWN} has a figure: --only {DRAWN}")
            check_figure(figure, force)
        earlier = [] if history is None else kept.read(history)
    choose_wait(partial(typer.echo, err=True))  # as a command that trains does
    missed = False
    for name in names:
        ratios = []
        try:
            for ratio in _measure(name):
                ratios.append(ratio)
                missed |= not ratio.reached
                typer.echo(json.dumps(asdict(ratio)) if as_json else str(ratio))
                before = kept.compare(ratio, earlier)
                if before:
                    typer.echo(f"  {before}", err=as_json)
        except MissingPeerError as error:
            raise refuse(error, 2) from error
        if history is not None:
            from analysis.provenance import find_commit

            with report_failures():
                kept.append(history, ratios, find_commit() or "unknown")
        if figure is not None and name == DRAWN:
            from analysis.plots.style import add_title
            from analysis.studies.scaling import draw
            from lab.machine.processor import describe_machine

            save_figure(add_title(draw(ratios), "Cost by size", describe_machine()), figure)
            typer.echo(figure, err=True)
    if missed:
        raise typer.Exit(1)


def _measure(name: str) -> Iterator["Ratio"]:
    """Yield the ratios of a benchmark, as soon as each is measured."""
    for module in (f"lab.bench.{name}", *FURTHER.get(name, ())):
        yield from import_module(module).measure()
