"""Tables of studies, for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from analysis.base import Table as Numbers
from analysis.studies.recall import Setting
from lab.studies.published import PUBLISHED
from lab.studies.recall import MIXERS


def build_recall_table(settings: Sequence[Setting]) -> Table:
    """Return the accuracy by mixer, row length and width; after a slash, the paper's.

    A star stands at settings with a run that reached its time limit unsolved.
    """
    widths = sorted({width for _, _, width in PUBLISHED})
    by_place = {(s.mixer, s.seq_len, s.d_model): s for s in settings}
    table = Table(
        box=None,
        title="test accuracy / the paper's (±0.02); *: a run was cut short",
        title_justify="left",
    )
    table.add_column("mixer")
    table.add_column("T", justify="right")
    for width in widths:
        table.add_column(f"d {width}", justify="right")
    known = dict.fromkeys(setting.mixer for setting in settings)
    for mixer in [*known, *(name for name in MIXERS if name not in known)]:
        if mixer not in known:
            table.add_row(mixer, "all", *["not run"] * len(widths))
        for length in sorted({length for name, length, _ in by_place if name == mixer}):
            cells = [_format_cell(by_place.get((mixer, length, width))) for width in widths]
            table.add_row(mixer, f"{length:,}", *cells)
    return table


def _format_cell(setting: Setting | None) -> str:
    if setting is None:
        return "not run"
    cut = "*" if setting.cut else ""
    published = "" if setting.published is None else f" / {setting.published:.2f}"
    return f"{setting.mean:.3f}{cut}{published}"


def build_numbers_table(numbers: Numbers) -> Table:
    """Return the numbers of a finding as a table, a line for each row."""
    table = Table(box=None)
    for i, name in enumerate(numbers.columns):
        table.add_column(name, justify="right" if i else "left")
    for row in numbers.rows:
        table.add_row(*row)
    return table
