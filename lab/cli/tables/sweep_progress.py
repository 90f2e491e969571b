"""A sweep while it runs: what is to do, a live table of its runs, and the time left."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lab.cli.console import open_console
from lab.cli.sweeping import Display, SweepPlan
from lab.cli.tables.durations import format_duration
from lab.files import RunError
from lab.sweeps.outcome import Status, find_status, open_run, read_last_step, read_lengths
from lab.sweeps.sweep import Cell
from lab.training.records import NOT_SOLVED, name_ending

REFRESHES = 2
"""How often a second the live table is drawn anew."""
OTHER_LINES = 6
"""Lines of the terminal that are not for runs."""


class SweepDisplay(Display):
    """Shows a sweep on stderr: live in a terminal, else a line for each beginning and end."""

    def __init__(self):
        self.console = open_console(stderr=True)
        self.plan: SweepPlan | None = None
        self.note = ""
        self.began: dict[str, tuple[float, int]] = {}
        self.ended: dict[str, tuple[Status, str]] = {}
        self.took: list[float] = []
        self.live = Live(
            console=self.console, refresh_per_second=REFRESHES, get_renderable=self._draw
        )

    def on_note(self, text: str) -> None:
        """Show what is done before the first run."""
        self.note = f"{text} …"
        self.live.refresh()

    def on_plan(self, plan: SweepPlan) -> None:
        """Print how many runs there are to do."""
        self.plan, self.note = plan, ""
        self.console.print(describe_plan(plan))

    def on_begin(self, cell: Cell) -> None:
        """Show that a run begins."""
        self.began[cell.name] = time.monotonic(), self._read(cell.name).get("step", 0)
        if not self.console.is_terminal:
            self.console.print(f"{cell.name}: started")

    def on_end(self, cell: Cell, error: str | None) -> None:
        """Show that a run has ended."""
        assert self.plan is not None
        began, _ = self.began.pop(cell.name)
        self.took.append(time.monotonic() - began)
        path = self.plan.out / cell.name
        status, minutes = find_status(path), f"{self.took[-1] / 60:.1f} min"
        said = "; ".join(filter(None, (describe_end(path, status, error), minutes)))
        self.ended[cell.name] = status, said
        if not self.console.is_terminal:
            number = f"{len(self.ended)}/{len(self.plan.todo)}"
            self.console.print(f"{number} {cell.name}: {said}; {self._describe_left()}")

    def _draw(self) -> Group:
        if self.plan is None or not self.plan.todo:
            return Group(Text(self.note))
        table = Table(box=None)
        for name in ("run", "step", "tokens", "accuracy", "validation", "how"):
            table.add_column(name, justify="left" if name in ("run", "how") else "right")
        rows = max(1, self.console.height - OTHER_LINES - len(self.began))
        for name, (status, said) in list(self.ended.items())[-rows:]:
            # The columns before tell which are not solved, and a terminal may have 80 columns.
            how = Text(said.removeprefix(NOT_SOLVED), no_wrap=True)
            row = self._describe_step(name)
            table.add_row(Text(name), *row, how, style="dim" * (status != "failed"))
        for name, (began, _) in list(self.began.items()):
            taken = format_duration(time.monotonic() - began)
            table.add_row(Text(name), *self._describe_step(name), f"running, {taken}", style="bold")
        counts = Counter(name_ending(status) for status, _ in self.ended.values())
        counted = ", ".join(f"{count} {status}" for status, count in counts.items())
        done = f"{len(self.ended)} of {len(self.plan.todo)} runs"
        line = "; ".join(filter(None, (done, counted, self._describe_left())))
        return Group(table, Text(line))

    def _read(self, name: str) -> dict:
        assert self.plan is not None
        return read_last_step(self.plan.out / name)

    def _describe_step(self, name: str) -> tuple[str, str, str, str]:
        row = self._read(name)
        validation = row.get("validation_accuracy")
        return (
            f"{row['step']:,}" if "step" in row else "",
            f"{row['seq_len']:,}" if "seq_len" in row else "",
            f"{row['accuracy']:.3f}" if "accuracy" in row else "",
            "" if validation is None else f"{validation:.3f}",
        )

    def _describe_left(self) -> str:
        assert self.plan is not None
        if len(self.ended) == len(self.plan.todo):
            return "none left"
        steps = {each.cell.name: each.run.train.max_steps for each in self.plan.todo}
        running, now = [], time.monotonic()
        for name, (began, first) in list(self.began.items()):
            step, most = self._read(name).get("step", 0), steps[name]
            running.append((now - began, max(0.0, step - first) / max(1, most - first)))
        waiting = len(self.plan.todo) - len(self.ended) - len(running)
        seconds = estimate_left(self.took, running, waiting, self.plan.workers)
        return "" if seconds is None else f"about {format_duration(seconds)} left"


def estimate_left(
    took: Sequence[float],
    running: Sequence[tuple[float, float]],
    waiting: int,
    workers: int,
) -> float | None:
    """Return about how many seconds a sweep still takes; None where nothing tells.

    Runs take as long as those that have ended, or at their own pace to their step limits.

    Args:
        took: seconds of each run that has ended.
        running: seconds of each run so far, and what share of its steps it has taken in them.
        waiting: runs that have not begun.
        workers: runs at a time.
    """
    paces = [seconds / share for seconds, share in running if share > 0]
    if not took and not paces:
        return None
    usual, left = mean(took or paces), 0.0
    for seconds, share in running:
        longer = seconds / share if share > 0 else seconds
        left += usual - seconds if took and seconds < usual else longer - seconds
    return (left + waiting * usual) / max(1, min(workers, len(running) + waiting))


def describe_plan(plan: SweepPlan) -> str:
    """Say how many runs there are to do, how many at a time, and where."""
    if not plan.todo:
        return f"all {plan.cells} runs have ended; they are in {plan.out}/"
    at_once = f"{plan.workers} {'process' if plan.workers == 1 else 'processes'} at a time"
    return (
        f"{len(plan.todo)} of {plan.cells} runs to do, {at_once}, in {plan.out}/. Ctrl-C stops; "
        "the same command resumes."
    )


def describe_end(path: Path, status: Status, error: str | None) -> str:
    """Describe in a few words how far a run got."""
    ending, run, found = name_ending(status), open_run(path), {}
    if run is not None and error is None:
        try:
            found = read_lengths(run)
        except RunError as failure:
            error = str(failure)
    lengths = ", ".join(f"{at['test']:.3f} at {length:,}" for length, at in found.items())
    return "; ".join(filter(None, (ending if error is None else f"{ending}, {error}", lengths)))


@contextmanager
def show_sweep() -> Iterator[SweepDisplay]:
    """Show a sweep on stderr while it runs."""
    display = SweepDisplay()
    if not display.console.is_terminal:
        yield display
        return
    with display.live:
        yield display
