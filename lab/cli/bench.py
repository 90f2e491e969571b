"""`lab bench`: measure every speed claim as a ratio of two times."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.bench import BENCHMARKS, ON_GPU
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
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Run only this benchmark; repeat for more: {', '.join(BENCHMARKS)}. "
            f"The last {len(ON_GPU)} need a GPU.",
        ),
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
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table in Markdown.")
    ] = False,
) -> None:
    """Measure every speed claim as a ratio of two times, both taken in the same run.

    Estimates of memory are compared with what is taken.
    """
    from lab.bench import history as kept
    from lab.peers import MissingPeerError

    with report_failures(), report_usage_errors():
        names = _choose(only or [])
        if as_json and markdown:
            raise ValueError("--json and --markdown: choose one")
        if figure is not None:
            if DRAWN not in names:
                raise ValueError(f"figure={figure}: only {DRAWN} has a figure: --only {DRAWN}")
            check_figure(figure, force)
        earlier = [] if history is None else kept.read(history)
    choose_wait(partial(typer.echo, err=True))  # as a command that trains does
    if markdown:
        typer.echo(_begin_table())
    missed = False
    for name in names:
        ratios = []
        try:
            for ratio in _measure(name):
                ratios.append(ratio)
                missed |= not ratio.reached
                if markdown:
                    typer.echo(ratio.to_markdown())
                else:
                    typer.echo(json.dumps(asdict(ratio)) if as_json else str(ratio))
                before = kept.compare(ratio, earlier)
                if before:
                    typer.echo(f"  {before}", err=as_json or markdown)
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


def _choose(asked: list[str]) -> list[str]:
    """Return the benchmarks to run: those asked for, or all that this machine can run.

    Raises:
        ValueError: for an unknown name, or one that needs a GPU where there is none.
    """
    from torch.cuda import is_available

    for name in asked:
        check_choice("only", name, BENCHMARKS)
    if is_available():
        return asked or [*BENCHMARKS]
    if missing := [name for name in asked if name in ON_GPU]:
        raise ValueError(f"only={missing[0]}: needs a GPU, and this machine has none")
    if not asked:
        typer.echo(f"No GPU, so these are left out: {', '.join(ON_GPU)}", err=True)
    return asked or [name for name in BENCHMARKS if name not in ON_GPU]


def _begin_table() -> str:
    """Return what stands above a table's rows: the machine, and the columns."""
    from lab.machine.device import choose_device, describe_device

    return (
        f"{describe_device(choose_device('auto'))}\n\n"
        "| measured | the lab's | the other's | unit | ratio | promised | note |\n"
        "|---|---|---|---|---|---|---|"
    )


def _measure(name: str) -> Iterator["Ratio"]:
    """Yield the ratios of a benchmark, as soon as each is measured."""
    for module in (f"lab.bench.{name}", *FURTHER.get(name, ())):
        yield from import_module(module).measure()
