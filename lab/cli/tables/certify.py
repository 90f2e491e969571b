"""A certificate in the terminal: a line per law, and the law that is being tried."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.table import Table
from rich.text import Text

from lab.certification import SIGNS, Certificate
from lab.console import open_table_console

STYLES = {
    "holds": "green",
    "fails": "bold red",
    "not applicable": "dim",
    "not decided": "yellow",
}

LAW_WIDTH = 15
"""Columns for a law's name; a longer one takes a second line."""


def build_law_table(law: Certificate) -> Table:
    """Build a law's line: sign, name, evidence; below a failure, its counter-example."""
    outcome, evidence = law["verdict"], law["evidence"]
    style = STYLES[outcome]
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(width=LAW_WIDTH)
    table.add_column(overflow="fold")
    words = evidence if outcome in ("holds", "fails") else f"{outcome}: {evidence}"
    table.add_row(Text(SIGNS[outcome], style), Text(law["law"], style), words)
    if law["counterexample"] is not None:
        table.add_row("", "", Text(law["counterexample"], "bold"))
    return table


@contextmanager
def show_progress() -> Iterator[
    tuple[Callable[[Sequence[str]], None], Callable[[str, int], None], Callable[[], None]]
]:
    """Show on stderr which law is tried.

    Yields three functions: one to call with the names of all laws, one to call with each law and
    its number before it is tried, and one that clears the line.
    """
    console = open_table_console(stderr=True)
    total = 0
    with console.status("probing …") as status:

        def on_laws(laws: Sequence[str]) -> None:
            nonlocal total
            total = len(laws)
            status.stop()

        def on_begin(law: str, number: int) -> None:
            status.update(f"{law} … {number + 1} of {total}")
            status.start()

        yield on_laws, on_begin, status.stop
