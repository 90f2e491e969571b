"""The table of an erratum, for the terminal."""

from rich.table import Table

from lab.errata.erratum import Erratum


def build_erratum_table(erratum: Erratum) -> Table:
    """Return a table of an erratum: each reading, its evidence, and how to train it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    mark = "✓" if erratum.confirmed else "✗"
    table.add_row(f"{mark} {erratum.row}", erratum.where, style="bold")
    for name, said, evidence, option in (
        ("printed", erratum.printed, erratum.printed_evidence, erratum.printed_option),
        ("intended", erratum.meant, erratum.meant_evidence, erratum.meant_option),
    ):
        table.add_row(f"  {name}", said)
        table.add_row("", f"→ {evidence[:1].upper()}{evidence[1:]}.")
        if option is not None:
            table.add_row("", option, style="dim")
    if erratum.note:
        table.add_row("  note", erratum.note)
    table.add_row()
    return table
