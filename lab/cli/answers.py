"""How commands answer: what went wrong in one line, with an exit code that says whose fault."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def report_failures() -> Iterator[None]:
    """Answer an expected failure with one line: exit code 2 for usage, 1 otherwise."""
    try:
        yield
    except Exception as error:
        # These import torch, which only a failure should wait for.
        from lab.training.fit import DivergedError
        from lab.training.runs import OutError, RunError
        from tasks.corpus import TextChangedError

        if not isinstance(error, RunError | DivergedError | TextChangedError):
            raise
        raise refuse(error, 2 if isinstance(error, OutError) else 1) from error


@contextmanager
def report_usage_errors() -> Iterator[None]:
    """Answer a bad value with one line and exit code 2."""
    try:
        yield
    except ValueError as error:
        raise refuse(error, 2) from error


def refuse(reason: object, code: int) -> typer.Exit:
    """Say why in one line, and return the exit with this code."""
    typer.echo(f"Error: {reason}", err=True)
    return typer.Exit(code)


def parse_assignments(texts: list[str]) -> dict[str, str]:
    """Read ["S.d_state=64", …] as options by name."""
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"option={text}: must look like S.d_state=64")
        if name in options:
            raise ValueError(f"option={text}: {name}={options[name]} is given too; choose one")
        options[name] = value
    return options
