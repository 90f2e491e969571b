"""The table of a model's blocks and parameters, for the terminal."""

from rich.table import Table

from lab.models.anatomy import Anatomy, Part
from lab.models.paper_sizes import SizeComparison


def build_anatomy_table(found: Anatomy) -> Table:
    """Return a model's parts from tokens to logits, alike neighbours in one row."""
    table = Table(box=None)
    for name in ("blocks", "part", ""):
        table.add_column(name, no_wrap=name == "part")
    for name in ("parameters each", "active"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(where: str, part: Part) -> None:
        table.add_row(where, part.name, part.note, f"{part.parameters:,}", f"{part.active:,}")

    add("", found.embedding)
    first = 0
    for repeat in found.unit:
        last = first + repeat.times - 1
        where = str(first) if first == last else f"{first}–{last}"
        for part in (repeat.pair.mixer, repeat.pair.transform):
            if part is not None:
                add(where, part)
                where = ""
        first += repeat.times
    add("", found.head)
    if found.times > 1:
        whole = "block 0 stands" if first == 1 else f"blocks 0–{first - 1} stand"
        table.caption = f"{whole} {found.times} times in a row"
    return table


def describe_totals(found: Anatomy, compared: SizeComparison | None) -> str:
    """Describe a model's totals, beside the paper's where it has one."""
    line = f"total {found.total:,} parameters, {found.active:,} of them active for a token"
    if compared is None:
        return line
    return f"{line}\nthe paper's {compared.size}: {compared.difference:+.2%}; {compared.because}"
