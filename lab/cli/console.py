"""The terminal that commands write to."""

from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that breaks lines only in a terminal, and there between words."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    console.soft_wrap = not console.is_terminal
    return console
