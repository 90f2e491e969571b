"""The `lab` command, assembled from its subcommands."""

import os
import sys
from typing import Annotated

import typer

from lab import __version__
from lab.cli import edge
from lab.cli.analysis import analyze, compare
from lab.cli.bench import bench
from lab.cli.certify import certify
from lab.cli.claim import claim
from lab.cli.command import Command, unwrap
from lab.cli.mixers import mixers
from lab.cli.paper import errata, model
from lab.cli.resume import resume
from lab.cli.runs import runs
from lab.cli.save_pretrained import save_pretrained
from lab.cli.studies import reproduce, study
from lab.cli.sweep import sweep
from lab.cli.task_commands import LazyTasks
from lab.cli.tasks import tasks
from lab.cli.verify import verify

# How long OpenMP's threads wait in a loop for the next work before they sleep: briefly, since what
# waits takes the time of whoever else wants its core (LOG.md). It is read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

app = typer.Typer(
    cls=LazyTasks,
    pretty_exceptions_enable=False,
    # To import rich would take as long as all the rest of `lab --help`.
    rich_markup_mode=None,
)
for command in (
    tasks,
    mixers,
    resume,
    analyze,
    compare,
    runs,
    save_pretrained,
    model,
    errata,
    certify,
    verify,
    sweep,
    claim,
    reproduce,
    study,
    bench,
):
    # Options that `lab sweep` does not know are those of `lab TASK`.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(
        cls=Command,
        help=unwrap(command.__doc__),
        context_settings=settings if command is sweep else None,
    )(command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"wonderful-lab {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def lab(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train small sequence models on synthetic tasks and see what they learned."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line."""
    sys.exit(edge.run(app))
