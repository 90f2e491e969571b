"""`lab bench`: measure every speed claim as a ratio of two times."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.bench import BENCHMARKS, ON_GPU
from lab.cli.figures import check_figure, make_figure_option, save_figure
from lab.cli.messages import refuse, report_failures, report_usage_errors
from lab.cli.output import AsJsonLines, Force
from tasks.bounds import check_choice

if TYPE_CHECKING:
    from lab.bench.ratio import Ratio

GPU = "gpu"
"""Names all benchmarks that need a GPU."""
DRAWN = "scaling"
"""The benchmark that has a figure."""


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Run only this benchmark; repeat for more: {', '.join(BENCHMARKS)}. "
            f"The last {len(ON_GPU)} need a GPU; {GPU} means them all.",
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

    Some are compared with a bound.
    """
    from lab.bench import history as kept
    from lab.peers import MissingPeerError

    with report_failures(), report_usage_errors():
        if as_json and markdown:
            raise ValueError("--json and --markdown: choose one")
        names = _choose(only or [])
        if figure is not None:
            if DRAWN not in names:
                raise ValueError(f"figure={figure}: only {DRAWN} has a figure: --only {DRAWN}")
            check_figure(figure, force)
        earlier = [] if history is None else kept.read(history)
    if missing := [name for name in ON_GPU if not only and name not in names]:
        typer.echo(f"No GPU, so these are left out: {', '.join(missing)}", err=True)
    if markdown:
        typer.echo(_begin_table())
    missed = False
    for name in names:
        ratios, missing_peer = [], None
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
            missing_peer = error
        if history is not None:
            from analysis.provenance import find_commit

            with report_failures():
                kept.append(history, ratios, find_commit() or "unknown")
        if missing_peer is not None:
            raise refuse(missing_peer, 2) from missing_peer
        if figure is not None and name == DRAWN:
            from analysis.plots.style import add_title
            from analysis.studies.scaling import draw
            from lab.machine import describe_machine

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

    here = [name for name in BENCHMARKS if is_available() or name not in ON_GPU]
    names: dict[str, None] = {}
    for name in asked:
        check_choice("only", name, (*BENCHMARKS, GPU))
        if (name not in here and name != GPU) or (name == GPU and not is_available()):
            raise ValueError(f"only={name}: needs a GPU, and this machine has none")
        names |= dict.fromkeys(ON_GPU if name == GPU else (name,))
    return [*names] or here


def _begin_table() -> str:
    """Return what stands above a table's rows: the machine, and the columns."""
    from lab.bench.history import describe_machine

    return (
        f"{describe_machine()}\n\n"
        "| measured | the lab's | the other's, or a bound | unit | ratio | promised | note |\n"
        "|---|---|---|---|---|---|---|"
    )


def _measure(name: str) -> Iterator["Ratio"]:
    """Yield the ratios of a benchmark, as soon as each is measured."""
    yield from import_module(f"lab.bench.{name}").measure()
