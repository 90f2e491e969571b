"""The `lab` command: what it is made of."""

import os
import sys

import typer

from lab.commands.analysis import analyze, compare
from lab.commands.bench import bench
from lab.commands.certify import certify
from lab.commands.paper import errata, model
from lab.commands.runs import runs
from lab.commands.studies import reproduce, study
from lab.commands.tasks import tasks
from lab.commands.training import LazyTasks

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


if __name__ == "__main__":
    sys.exit(main())
