"""How commands print: control characters escaped, errors in one line, exit codes for usage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from lab.training.run import Run


@contextmanager
def report_failures() -> Iterator[None]:
    """Report an expected failure in one line: exit code 2 for wrong usage, 1 otherwise."""
    try:
        yield
    except Exception as error:
        # These import torch, which only a failure should wait for.
        from lab.files import RunError
        from lab.training.loop import DivergedError
        from lab.training.run import OutError
        from tasks.corpus import TextChangedError

        if not isinstance(error, RunError | DivergedError | TextChangedError):
            raise
        raise refuse(error, 2 if isinstance(error, OutError) else 1) from error


@contextmanager
def report_usage_errors() -> Iterator[None]:
    """Report a bad value in one line, with exit code 2."""
    try:
        yield
    except ValueError as error:
        raise refuse(error, 2) from error


def say(text: object, *, err: bool = False) -> None:
    """Print text whose control characters are shown as escapes."""
    from lab.files import escape_controls

    typer.echo(escape_controls(str(text)), err=err)


def say_if_changed(run: "Run") -> None:
    """Say that the code of a run's own mixer is no longer that of its training, if so."""
    change = run.describe_change()
    if change:
        say(f"{run.path}: {change}; its weights are now used in other code", err=True)


def refuse(reason: object, code: int) -> typer.Exit:
    """Print the reason in one line, and return the exception that exits with a code."""
    from lab.cli.console import open_console
    from lab.files import escape_controls

    open_console(stderr=True).print(f"Error: {escape_controls(str(reason))}")
    return typer.Exit(code)


def parse_assignments(texts: list[str]) -> dict[str, str]:
    """Parse ["S.d_state=64", …] into options by name."""
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"option={text}: must look like S.d_state=64")
        if name in options:
            raise ValueError(f"option={text}: {name}={options[name]} is given too; choose one")
        options[name] = value
    return options
