"""The `lab` command: one command for each task, built when it is asked for, and the others."""

import os
import sys
from typing import Annotated, Any

import typer

from lab import __version__
from lab.cli.certify import certify
from lab.cli.command import Command, Group, unwrap
from lab.cli.run import analyze, compare, runs, save_pretrained
from lab.cli.suite import bench, errata, mixers, model, tasks, verify
from lab.cli.sweep import claim, profile, reproduce, study, sweep
from lab.cli.task import build_trainer, resume
from tasks import TASKS

# How long OpenMP's threads wait in a loop for the next work before they sleep: briefly, since what
# waits takes the time of whoever else wants its core (LOG.md). It is read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


class TaskGroup(Group):
    """The commands; that of a task is made of the task's class when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the tasks' names, then the other commands'."""
        return [*TASKS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of this name."""
        known = cmd_name in TASKS
        return build_task_command(cmd_name) if known else super().get_command(ctx, cmd_name)

    def describe(self, ctx: Any, name: str) -> tuple[str, str]:
        """Return the section of a command in the help, and its own help."""
        if name not in TASKS:
            return super().describe(ctx, name)
        return "Tasks, to train a model on", describe_task(name)


def describe_task(name: str) -> str:
    """Return what a task is: the first paragraph of its module's docstring."""
    return (sys.modules[TASKS[name].__module__].__doc__ or "").partition("\n\n")[0]


def build_task_command(name: str) -> Any:
    """Return the command of a task, with every field of the configurations as an option."""
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(name, cls=Command, help=unwrap(describe_task(name)))(build_trainer(name))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=TaskGroup,
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
    profile,
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
