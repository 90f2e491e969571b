"""The group of commands: one for each task, built when it is asked for, and the others."""

import ast
import tokenize
from copy import copy
from importlib.util import find_spec
from typing import Any

import typer

from lab.cli.command import Command, Group
from lab.cli.training import build_trainer
from tasks import TASKS

TASK_PANEL = "Tasks, to train a model on"


class LazyTasks(Group):
    """A command group that imports a task, and torch, only to run it."""

    listing = False

    def list_commands(self, ctx):
        """Return the tasks' names, then the other commands'."""
        return [*TASKS, *super().list_commands(ctx)]

    def get_command(self, ctx, cmd_name):
        """Return a command; that of a task is built now, without options if it is only listed."""
        if cmd_name not in TASKS:
            return super().get_command(ctx, cmd_name)
        return build_task_command(cmd_name, options=not self.listing)

    def format_help(self, ctx, formatter):
        """Write the help, which imports no task."""
        shown = copy(self)
        shown.listing = True
        super(LazyTasks, shown).format_help(ctx, formatter)


def build_task_command(name: str, *, options: bool = True) -> Any:
    """Return the command of a task, with every field of the configurations as an option."""
    summary = _read_summary(TASKS.module(name))
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    function = build_trainer(name) if options else lambda: None
    alone.command(name, cls=Command, help=summary, rich_help_panel=TASK_PANEL)(function)
    return typer.main.get_command(alone)


def _read_summary(module: str) -> str:
    """Return the first paragraph of a module's docstring, without importing the module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with tokenize.open(spec.origin) as source:
        tokens = tokenize.generate_tokens(source.readline)
        docstring = next(token.string for token in tokens if token.type == tokenize.STRING)
    return ast.literal_eval(docstring).partition("\n\n")[0]
