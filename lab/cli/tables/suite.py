"""The table of all tasks, for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lab.suite.survey import Size, TaskSummary

ROOM_FOR_A_LINE = 136
"""Columns that a terminal needs to show each task on one line."""


def build_suite_table(entries: Sequence[TaskSummary], width: int) -> RenderableType:
    """Build the table of the suite: one line a task where there is room, else several."""
    numbers = (
        "scored",
        "chance",
        "µs per row",
        "tokens × vocabulary",
        "starts at",
        "small",
        "published",
    )
    if width >= ROOM_FOR_A_LINE:
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("task", no_wrap=True)
        table.add_column("what it tests", overflow="fold")
        for name in numbers:
            table.add_column(name, justify="right", no_wrap=True)
        for entry in entries:
            table.add_row(entry.name, entry.separates, *_format_numbers(entry))
        fixed = [
            f"— {e.name} cannot shorten its rows: {e.why_fixed}." for e in entries if not e.grows
        ]
        start = "starts at: tokens per row when training starts; rows grow from there."
        return Group(table, Text("\n".join(["", start, *fixed])))
    parts: list[RenderableType] = []
    for entry in entries:
        parts.append(Text(f"{entry.name}: {entry.separates}"))
        scored, chance, cost, size, start, small, published = _format_numbers(entry)
        grows = ", ".join(entry.grows)
        below = (
            f"{size} (small {small}, published {published})",
            f"grows from {start} tokens ({grows})" if grows else f"fixed: {entry.why_fixed}",
            f"{scored} scored, chance {chance}, {cost} µs per row",
        )
        parts.append(Padding(Text("\n".join(below)), (0, 0, 0, 4)))
    parts.append(Text("Sizes are tokens a row × vocabulary."))
    return Group(*parts)


def _format_numbers(entry: TaskSummary) -> tuple[str, ...]:
    return (
        f"{entry.scored:,.0f}" if entry.scored == int(entry.scored) else f"{entry.scored:,.1f}",
        f"{entry.chance:.2g}",
        f"{entry.microseconds:,.0f}" if entry.microseconds >= 10 else f"{entry.microseconds:.1f}",
        _format_size(entry.size),
        f"{entry.grows_from:,}" if entry.grows else "—",
        _format_size(entry.presets["small"]),
        _format_size(entry.presets["published"]),
    )


def _format_size(size: Size) -> str:
    return f"{size.seq_len:,} × {size.vocab_size:,}"
