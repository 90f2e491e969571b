"""Rows of a task in a terminal: one cell a token, coloured by role, with the target below it."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lab.palette import choose_ink, color_roles
from tasks.base import Batch, Task
from tasks.mixture import Mixture

EDGE = 64
"""Positions of a folded row that are shown at its beginning, and again where its answers end."""
STRIDE = 4
"""Lines hold a multiple of this many cells where they can, so that positions are easy to count."""
SPACE = "␣"


def print_rows(
    console: Console, task: Task, *, split: str, seed: int, count: int, whole: bool
) -> None:
    """Print the first rows of a split.

    Where the console has no colours, a line of letters below each block names the roles.

    Args:
        console: where to print.
        task: the task that generates the rows.
        split: the split that they belong to.
        seed: the seed of the rows.
        count: number of rows.
        whole: print long rows in full instead of leaving out their middle.
    """
    coloured = console.is_terminal and console.color_system is not None and not console.no_color

    options = ", ".join(f"{k}={v}" for k, v in task.options.items() if v is not None)
    console.print(Text(f"{task.name}: {options}"))
    console.print(_format_legend(task.role_names, coloured))
    for number in range(count):
        batch = task.batch(split=split, start=number, size=1, seed=seed)
        (part,), setting = task.list_tasks(batch), ""
        if isinstance(task, Mixture):
            batch = batch.take(slice(None), part.seq_len)
            setting = "; " + ", ".join(f"{name}={getattr(part, name)}" for name in task.varied)
        console.print()
        scored = int(batch.scored.sum())
        about = f"row {number} of {split}, seed {seed}: {part.seq_len:,} tokens, {scored:,} scored"
        console.print(Text(about + setting))
        for line in _format_row(part, batch, console.width, coloured, whole):
            console.print(line, soft_wrap=True)


def choose_letters(names: Sequence[str]) -> list[str]:
    """Return a different letter for each name, one that occurs in the name where possible."""
    found: list[str] = []
    for name in names:
        own = [*filter(str.isalpha, name.lower()), *"abcdefghijklmnopqrstuvwxyz"]
        found.append(next(letter for letter in own if letter not in found))
    return found


def escape(text: str) -> str:
    """Return a token's text with visible signs for spaces and control characters."""
    return "".join(SPACE if c == " " else c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _format_legend(names: Sequence[str], coloured: bool) -> Text:
    legend = Text("roles:")
    if coloured:
        for name, colour in zip(names, color_roles(names), strict=True):
            legend.append(" ").append(f" {name} ", style=f"{choose_ink(colour)} on {colour}")
        return legend.append("; → targets")
    for letter, name in zip(choose_letters(names), names, strict=True):
        legend.append(f" {letter} {name},")
    return legend.append(" below; → targets")


def _format_row(
    task: Task, batch: Batch, width: int, coloured: bool, whole: bool
) -> Iterator[Text]:
    """Yield the lines for a batch of one row: blocks of tokens, targets and roles."""
    t = task.seq_len
    parts = (batch.inputs, batch.targets, batch.roles, batch.scored)
    inputs, targets, roles, scored = (part[0].tolist() for part in parts)
    pieces = [(0, t)] if whole or t <= 2 * EDGE else _find_shown(scored)
    places = [i for first, end in pieces for i in range(first, end)]
    tokens = {i: escape(task.format_token(inputs[i])) for i in places}
    answers = {i: escape(task.format_token(targets[i])) for i in places if scored[i]}
    cell = max(map(cell_len, (*tokens.values(), *answers.values())))
    margin = len(str(t - 1))
    count = max(1, (width - margin - 1) // (cell + 1))
    count -= count % STRIDE if count > STRIDE else 0
    colours, names = color_roles(task.role_names), choose_letters(task.role_names)
    shown = 0
    for first, end in pieces:
        if first > shown:
            yield _describe_hidden(scored[shown:first])
        shown = end
        for start in range(first, end, count):
            block = range(start, min(start + count, end))
            line = Text(f"{start:>{margin}}│")
            for i in block:
                colour = colours[roles[i]]
                style = f"{choose_ink(colour)} on {colour}" if coloured else ""
                line.append(" ").append(_align_right(tokens[i], cell), style=style)
            yield line
            if any(i in answers for i in block):
                yield _format_line(
                    "→".rjust(margin) + "│", [answers.get(i, "") for i in block], cell
                )
            if not coloured:
                yield _format_line(" " * margin + "│", [names[roles[i]] for i in block], cell)

    if shown < t:
        yield _describe_hidden(scored[shown:])


def _find_shown(scored: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the two spans of a long row that are shown: its beginning, and where answers end."""
    t = len(scored)
    answered = max(i for i, asked in enumerate(scored) if asked) + 1
    end = t if t - answered < EDGE else max(answered, 2 * EDGE)
    return [(0, EDGE), (end - EDGE, end)]


def _describe_hidden(scored: Sequence[bool]) -> Text:
    """Describe how many positions are left out."""
    of_them = f", {sum(scored):,} of them scored" if any(scored) else ""
    return Text(f"… {len(scored):,} more{of_them} …")


def _format_line(label: str, cells: Sequence[str], width: int) -> Text:
    return Text("".join([label, *(f" {_align_right(cell, width)}" for cell in cells)]).rstrip())


def _align_right(text: str, width: int) -> str:
    """Align text to the right of a number of columns; some characters take two."""
    return " " * (width - cell_len(text)) + text
