"""The terminal that commands write to."""

from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that breaks only lines of a terminal, between words, and keeps `:x:`."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    console.soft_wrap = not console.is_terminal
    return console
