"""The `lab` command, assembled from its subcommands."""

import os
import sys

import typer

from lab.cli.analysis import analyze, compare
from lab.cli.bench import bench
from lab.cli.certify import certify
from lab.cli.paper import errata, model
from lab.cli.runs import runs
from lab.cli.studies import reproduce, study
from lab.cli.tasks import tasks
from lab.cli.training import LazyTasks

app = typer.Typer(
    cls=LazyTasks,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train small sequence models on synthetic tasks and see what they learned.",
)
for command in (
    tasks,
    analyze,
    compare,
    runs,
    model,
    errata,
    certify,
    reproduce,
    study,
    bench,
):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    # Threads of OpenMP that wait long in a loop take the time of those they wait for, where a
    # machine is shared; asleep at once they wake late, where it is not (LOG.md has the numbers).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # --model MODULE:CLASS is looked for in the user's folder, as `python -m` would.
    sys.path.insert(0, os.getcwd())
    app()
