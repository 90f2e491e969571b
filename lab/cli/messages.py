"""How commands print: control characters escaped, errors in one line, exit codes for usage."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lab.files import RunError, escape_controls
from tasks.bounds import TextChangedError

SECONDS = 1.5
"""After which a user is told what takes so long."""


@contextmanager
def report_failures() -> Iterator[None]:
    """Report an expected failure in one line: exit code 2 for wrong usage, 1 otherwise."""
    try:
        yield
    except (RunError, TextChangedError) as error:
        from lab.training.run import OutError

        raise refuse(error, 2 if isinstance(error, OutError) else 1) from error
    except typer.Exit:
        raise
    except Exception as error:
        # These import torch, which only a failure should wait for.
        from analysis.base import NotApplicableError
        from analysis.pages.export import BrowserError
        from lab.api.sweeping import InterruptedSweepError
        from lab.training.loop import DivergedError

        match error:
            case InterruptedSweepError():
                raise refuse(error, 128 + error.signal) from error
            case NotApplicableError():
                raise refuse(f"only={error}; it does not apply to this run", 2) from error
            case BrowserError():
                raise refuse(error, 2) from error
            case DivergedError():
                raise refuse(error, 1) from error
        raise


@contextmanager
def report_usage_errors() -> Iterator[None]:
    """Report a bad value in one line, with exit code 2."""
    try:
        yield
    except ValueError as error:
        raise refuse(error, 2) from error


def say(text: object, *, err: bool = False) -> None:
    """Print text whose control characters are shown as escapes."""
    typer.echo(escape_controls(str(text)), err=err)


def refuse(reason: object, code: int) -> typer.Exit:
    """Print the reason in one line, and return the exception that exits with a code."""
    from lab.console import open_console

    open_console(stderr=True).print(f"Error: {escape_controls(str(reason))}")
    return typer.Exit(code)


@contextmanager
def say_if_slow(what: str) -> Iterator[None]:
    """Print what is being done to standard error if a `with` block takes long; empty: never."""
    timer = threading.Timer(SECONDS, _say_doing, [what])
    timer.daemon = True
    if what:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_doing(what: str) -> None:
    from lab.console import open_console

    open_console(stderr=True).print(f"{what}; Ctrl-C stops")
