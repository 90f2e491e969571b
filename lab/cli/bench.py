"""`lab bench`: measure every speed claim as a ratio of two times."""

import json
from dataclasses import asdict
from importlib import import_module
from typing import Annotated

import typer

from lab.bench import BENCHMARKS
from lab.cli.answers import refuse


def bench(
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Run only this benchmark: {', '.join(BENCHMARKS)}."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Measure every speed claim as a ratio of two times, both taken in the same run."""
    from lab.peers import MissingPeerError

    if only is not None and only not in BENCHMARKS:
        raise refuse(f"only={only}: must be one of {', '.join(BENCHMARKS)}", 2)
    missed = False
    for name in [only] if only else BENCHMARKS:
        try:
            ratios = import_module(f"lab.bench.{name}").measure()
        except MissingPeerError as error:
            raise refuse(error, 2) from error
        for ratio in ratios:
            missed |= not ratio.reached
            typer.echo(json.dumps(asdict(ratio)) if as_json else str(ratio))
    if missed:
        raise typer.Exit(1)
