"""A sweep while it runs: its cost before it starts, a live table of its cells, the time left."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lab.cli.console import open_console
from lab.cli.sweeping import Display, SweepPlan, describe_cell
from lab.cli.tables.durations import format_duration
from lab.sweeps.cost import Pace, add_up
from lab.sweeps.folder import CellFolder
from lab.sweeps.sweep import Cell
from lab.training.endings import NOT_SOLVED, name_ending

REFRESHES = 2
"""How often a second the live table is drawn anew."""
OTHER_LINES = 6
"""Lines of the terminal that are not for cells."""
UNLESS_EARLY = " if no run ends early"
"""Said of a time to the limits of steps and minutes, at the speed that was measured."""


class SweepDisplay(Display):
    """Shows a sweep on stderr: live in a terminal, else a line for each beginning and end."""

    def __init__(self):
        self.console = open_console(stderr=True)
        self.plan: SweepPlan | None = None
        self.note = ""
        self.began: dict[str, tuple[float, int]] = {}
        self.ended: dict[str, tuple[str, str]] = {}
        self.live = Live(
            console=self.console, refresh_per_second=REFRESHES, get_renderable=self._draw
        )

    def on_note(self, text: str) -> None:
        """Show what is done before the first run."""
        self.note = f"{text} …"
        self.live.refresh()

    def on_plan(self, plan: SweepPlan) -> None:
        """Print what the sweep costs."""
        self.plan, self.note = plan, ""
        self.console.print(describe_cost(plan))

    def on_begin(self, cell: Cell) -> None:
        """Show that a cell begins."""
        self.began[cell.name] = time.monotonic(), self._read_step(cell.name)
        if not self.console.is_terminal:
            self.console.print(f"{cell.name}: started")

    def on_end(self, cell: Cell, folder: CellFolder, error: str | None) -> None:
        """Show that a cell has ended, or was found so."""
        assert self.plan is not None
        began = self.began.pop(cell.name, None)
        if began is None:  # it had ended before
            return
        share = self.plan.lanes.sizes[cell.name]
        self.plan.left.note(cell.name, (time.monotonic() - began[0]) / share)
        said = describe_cell(folder, error)
        self.ended[cell.name] = folder.find_status(), said
        if not self.console.is_terminal:
            number = f"{len(self.ended)}/{len(self.plan.costs)}"
            self.console.print(f"{number} {cell.name}: {said}; {self._describe_left()}")

    def _draw(self) -> Group:
        if self.plan is None or not self.plan.costs:
            return Group(Text(self.note))
        table = Table(box=None)
        for name in ("run", "step", "tokens", "accuracy", "validation", "how"):
            table.add_column(name, justify="left" if name in ("run", "how") else "right")
        rows = max(1, self.console.height - OTHER_LINES - len(self.began))
        for name, (status, said) in list(self.ended.items())[-rows:]:
            # The columns before tell which are not solved, and a terminal may have 80 columns.
            how = Text(said.removeprefix(NOT_SOLVED), no_wrap=True)
            row = self._read(name)
            table.add_row(Text(name), *row, how, style="dim" * (status != "failed"))
        for name, (began, _) in list(self.began.items()):
            taken = format_duration(time.monotonic() - began)
            table.add_row(Text(name), *self._read(name), f"running, {taken}", style="bold")
        counts = Counter(name_ending(status) for status, _ in self.ended.values())
        counted = ", ".join(f"{count} {status}" for status, count in counts.items())
        done = f"{len(self.ended)} of {len(self.plan.costs)} runs"
        line = "; ".join(filter(None, (done, counted, self._describe_left())))
        return Group(table, Text(line))

    def _read_step(self, name: str) -> int:
        assert self.plan is not None
        return CellFolder(self.plan.out / name).read_last_step().get("step", 0)

    def _read(self, name: str) -> tuple[str, str, str, str]:
        assert self.plan is not None
        row = CellFolder(self.plan.out / name).read_last_step()
        validation = row.get("validation_accuracy")
        return (
            f"{row['step']:,}" if "step" in row else "",
            f"{row['seq_len']:,}" if "seq_len" in row else "",
            f"{row['accuracy']:.3f}" if "accuracy" in row else "",
            "" if validation is None else f"{validation:.3f}",
        )

    def _describe_left(self) -> str:
        assert self.plan is not None
        if not self.plan.left.sizes:
            return "none left"
        now, sizes = time.monotonic(), self.plan.lanes.sizes
        seconds, bound = self.plan.left.estimate(
            {
                name: Pace((now - began) / sizes[name], first, self._read_step(name))
                for name, (began, first) in list(self.began.items())
            }
        )
        return f"about {format_duration(seconds)} left{UNLESS_EARLY if bound else ''}"


def describe_cost(plan: SweepPlan) -> str:
    """Say how many runs there are to do, and how long they take to their limits and usually."""
    todo = list(plan.costs.values())
    at_once = f"{plan.workers} {'process' if plan.workers == 1 else 'processes'} at a time"
    opening = f"{len(todo)} of {plan.cells} runs to do, {at_once}, in {plan.out}/"
    if not todo:
        return f"all {plan.cells} runs have ended; they are in {plan.out}/"
    steps = sorted(1000 * cost.step for cost in todo)
    step = f"{steps[0]:,.0f}"
    if round(steps[-1]) != round(steps[0]):
        step += f" to {steps[-1]:,.0f}"
    most = add_up(todo, plan.workers, plan.max_minutes)
    text = (
        f"{opening}. A step at the full row length takes {step} ms, so training takes about "
        f"{format_duration(most)}{UNLESS_EARLY}."
    )
    known = [cost.usual for cost in todo if cost.usual is not None]
    if known:
        usual = format_duration(sum(known) / plan.workers)
        which = "They are" if len(known) == len(todo) else f"{len(known)} of them are"
        text += f" {which} usually solved in {usual}."
    parts = text, plan.lanes.describe(), "Ctrl-C stops; the same command resumes."
    return " ".join(filter(None, parts))


@contextmanager
def show_sweep() -> Iterator[SweepDisplay]:
    """Show a sweep on stderr while it runs."""
    display = SweepDisplay()
    if not display.console.is_terminal:
        yield display
        return
    with display.live:
        yield display
