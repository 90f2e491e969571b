"""`lab bench`: measure every speed claim as a ratio of two times."""

import json
from dataclasses import asdict
from importlib import import_module
from typing import Annotated

import typer

from lab.bench import BENCHMARKS, ON_GPU
from lab.cli.messages import refuse, report_usage_errors
from lab.cli.output import AsJsonLines
from tasks.bounds import check_choice


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Run only this benchmark; repeat for more: {', '.join(BENCHMARKS)}. "
            f"{', '.join(ON_GPU)} needs a GPU.",
        ),
    ] = None,
    as_json: AsJsonLines = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table in Markdown.")
    ] = False,
) -> None:
    """Measure every speed claim as a ratio of two times, both taken in the same run.

    Some are compared with a bound.
    """
    from torch.cuda import is_available

    from lab.machine import choose_device, describe_device
    from lab.peers import MissingPeerError

    here = [name for name in BENCHMARKS if is_available() or name not in ON_GPU]
    with report_usage_errors():
        if as_json and markdown:
            raise ValueError("--json and --markdown: choose one")
        for name in only or []:
            check_choice("only", name, BENCHMARKS)
            if name not in here:
                raise ValueError(f"only={name}: needs a GPU, and this machine has none")
    if not only and len(here) < len(BENCHMARKS):
        typer.echo(f"No GPU, so these are left out: {', '.join(ON_GPU)}", err=True)
    if markdown:
        typer.echo(
            f"{describe_device(choose_device('auto'))}\n\n"
            "| measured | the lab's | the other's, or a bound | unit | ratio | promised | note |\n"
            "|---|---|---|---|---|---|---|"
        )
    missed = False
    for name in dict.fromkeys(only or here):
        try:
            for ratio in import_module(f"lab.bench.{name}").measure():
                missed |= not ratio.reached
                if markdown:
                    typer.echo(ratio.to_markdown())
                else:
                    typer.echo(json.dumps(asdict(ratio)) if as_json else str(ratio))
        except MissingPeerError as error:
            raise refuse(error, 2) from error
    if missed:
        raise typer.Exit(1)
