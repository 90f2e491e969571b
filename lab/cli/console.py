"""The terminal that commands write to."""

from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """Return a console for sentences: it breaks only lines of a terminal, between words."""
    console = open_table_console(stderr=stderr)
    console.soft_wrap = not console.is_terminal
    return console


def open_table_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console for tables. `[x]` and `:x:` are text on every console of the lab."""
    return Console(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)
