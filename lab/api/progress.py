"""Progress of training, analyses and sweeps: on stderr, or in the output of a notebook's cell."""

import html
import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lab.api.results import format_duration
from lab.console import open_console
from lab.files import RunError
from lab.lengthening import explain_start_length, list_stages
from lab.models.architectures import describe_user_mixers
from lab.sweeps.outcome import Status, find_status, open_run, read_last_step, read_lengths
from lab.sweeps.pool import CellRun
from lab.sweeps.sweep import Cell
from lab.training.experiment import Plan
from lab.training.loop import Row
from lab.training.records import NOT_SOLVED, name_ending
from lab.training.run import Run

RECENT_STEPS = 50
"""Number of last steps whose median time is shown."""
EVERY = 0.2
"""Seconds between two updates of a notebook's bar."""
REFRESHES = 2
"""How often a second the live table of a sweep is drawn anew."""
OTHER_LINES = 6
"""Lines of the terminal that are not for a sweep's runs."""


class _TwoLines(Progress):
    """A bar, and below it a line of text."""

    below = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield both lines."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.below)


class TrainingDisplay:
    """Shows the plan of a training, and a live bar with the time left up to the limit of steps.

    Without a terminal there is no bar, and each evaluation prints a line.

    Args:
        run: what is trained.
    """

    def __init__(self, run: Run):
        self.run = run
        self.console = open_console(stderr=True)
        self.bar = _TwoLines(
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
            expand=True,
        )
        self.shown = self.bar.add_task("", total=None, visible=False)
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.held_out = ""

    def on_plan(self, plan: Plan) -> None:
        """Print what training is about to do."""
        run, write = self.run, self.console.print
        tokens = run.train.batch_size * run.task.seq_len
        write(
            f"{run.task.name}: {run.model.name}, {plan.parameters:,} parameters, "
            f"{run.train.optimizer}, {tokens:,} tokens per step"
        )
        for line in describe_user_mixers(run.model):
            write(line)
        write(f"state of a row: {plan.state_size}")
        write(f"on {plan.device} in {describe_choice(plan)}")
        write(f"run folder: {run.path}", soft_wrap=True)
        if plan.certified:
            write(f"certified: {plan.certified}")
        if len(plan.seq_lens) > 1:
            until = f"at a validation {run.task.measure} of {100 * run.train.lengthen_at:.1f} %"
            if run.train.unlearned == "lengthen":
                until += f", or after {run.train.stage_steps:,} steps"
            lengths = " → ".join(f"{n:,}" for n in plan.seq_lens)
            write(f"row length: {lengths} tokens, longer {until}")
        why = explain_start_length(run.task, run.train)
        if why:
            first = list_stages(run.task, run.train)[0].task.seq_len
            write(f"the first rows have {first:,} tokens and not fewer: {why}")
        if plan.first_step:
            write(f"resuming after step {plan.first_step:,}")
        self.bar.update(self.shown, visible=True)

    def on_row(self, row: Row) -> None:
        """Show a step."""
        self.recent.append(row.seconds)
        each = median(self.recent)
        if row.validation_accuracy is not None:
            self.held_out = f"  validation {row.validation_accuracy:.3f}"
        if row.test_accuracy is not None:
            self.held_out = f"  test {row.test_accuracy:.3f}"
        solved = (row.test_accuracy or 0.0) >= self.run.train.solved_at
        left = (self.run.train.max_steps - row.step) * each
        rest = "" if solved or not left else f"at most {format_duration(left)} left at this pace"
        metrics = (
            f"{row.seq_len:,} tokens  loss {row.loss:.3f}  "
            f"{self.run.task.measure} {row.accuracy:.3f}{self.held_out}  {1000 * each:,.0f} ms"
        )
        self.bar.below = metrics
        self.bar.update(
            self.shown,
            total=self.run.train.max_steps,
            completed=row.step,
            description=f"step {row.step:,}  {rest}",
        )
        if not self.console.is_terminal and row.validation_accuracy is not None:
            self.console.print(f"step {row.step:,}  {metrics}  {rest}".rstrip())

    def on_note(self, text: str) -> None:
        """Show what is done besides steps."""
        self.bar.below = f"{text} …"
        done = self.bar.tasks[0].completed
        self.bar.update(self.shown, description=f"step {done:,.0f}", refresh=True)


def describe_choice(plan: Plan) -> str:
    """Return precision and threads of a training, and how much slower the other choices are."""
    chosen, *others = [
        f"{found.precision}, {found.threads} thread{'s' if found.threads > 1 else ''}"
        for found in (plan.best, *plan.others)
    ]
    slower = [
        f"{other}: {found.seconds / plan.best.seconds:.2f}"
        for other, found in zip(others, plan.others, strict=True)
    ]
    if not slower:
        return chosen
    return f"{chosen} (times as long a step: {'; '.join(slower)})"


@contextmanager
def show_progress(run: Run) -> Iterator[TrainingDisplay]:
    """Show a training while it runs; yields what to call."""
    display = TrainingDisplay(run)
    with display.bar:
        yield display
        display.bar.below = ""


@contextmanager
def show_count(names: Sequence[str], what: str) -> Iterator[Callable[[str], None]]:
    """Show a live bar over named steps; yields a function to call when a step begins."""
    console = open_console(stderr=True)
    columns = (
        TextColumn(f"{what} "),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        shown, ended = bar.add_task("", total=len(names)), itertools.count()

        def on_begin(name: str) -> None:
            bar.update(shown, completed=next(ended), description=name)

        yield on_begin
        bar.update(shown, completed=len(names), description="done")


class NotebookBar:
    """A bar in the output of a notebook's cell.

    It is divided evenly among the row lengths, since the number of steps is not known before.

    Args:
        run: what is trained.
    """

    def __init__(self, run: Run):
        from IPython.display import display

        self.run, self.seq_lens = run, (run.task.seq_len,)
        self.shown_at, self.share, self.held_out = 0.0, 0.0, ""
        self.handle = display({"text/plain": ""}, raw=True, display_id=True)

    def on_plan(self, plan: Plan) -> None:
        """Show what training is about to do."""
        self.seq_lens = plan.seq_lens
        self._show(f"{plan.parameters:,} parameters on {plan.device} in {plan.best.precision}")

    def on_row(self, row: Row) -> None:
        """Show a step, unless the last one was shown just now."""
        if row.validation_accuracy is not None:
            self.held_out = f", validation {row.validation_accuracy:.3f}"
        done = self.seq_lens.index(row.seq_len) if row.seq_len in self.seq_lens else 0
        self.share = (done + row.accuracy) / len(self.seq_lens)
        if time.monotonic() - self.shown_at >= EVERY:
            self.shown_at = time.monotonic()
            about = f"step {row.step:,}, rows of {row.seq_len:,} tokens"
            self._show(f"{about}, {self.run.task.measure} {row.accuracy:.3f}{self.held_out}")

    def on_note(self, text: str) -> None:
        """Show what is done besides steps."""
        self._show(f"{text} …")

    def clear(self) -> None:
        """Empty the output: the run itself is shown next."""
        assert self.handle is not None
        self.handle.update({"text/plain": ""}, raw=True)

    def _show(self, text: str) -> None:
        line = f"{self.run.task.name}: {text}"
        bar = f'<progress max="1" value="{self.share:.3f}" style="width:16em"></progress>'
        shown = {"text/plain": line, "text/html": f"{bar} <code>{html.escape(line)}</code>"}
        assert self.handle is not None
        self.handle.update(shown, raw=True)


@contextmanager
def choose_progress(run: Run) -> Iterator[NotebookBar | TrainingDisplay]:
    """Show a bar in the notebook that Python runs in, or else the command's on stderr."""
    ipython = sys.modules.get("IPython")
    if hasattr(ipython.get_ipython() if ipython is not None else None, "kernel"):
        bar = NotebookBar(run)
        yield bar
        bar.clear()
    else:
        with show_progress(run) as display:
            yield display


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is about to do.

    Attributes:
        cells: how many cells there are.
        todo: the runs that have not ended.
        workers: runs at a time.
        out: the folder of the run folders.
    """

    cells: int
    todo: Sequence[CellRun]
    workers: int
    out: Path


class Display:
    """Shows a sweep while it runs; this one shows nothing."""

    def on_note(self, text: str) -> None:
        """Show what is done before the first run."""

    def on_plan(self, plan: SweepPlan) -> None:
        """Show what is about to be done."""

    def on_begin(self, cell: Cell) -> None:
        """Show that a cell begins."""

    def on_end(self, cell: Cell, error: str | None) -> None:
        """Show that a cell has ended."""


def show_nothing() -> AbstractContextManager[Display]:
    """Open a display that shows nothing."""
    return nullcontext(Display())


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
        status, minutes = find_status(self.plan.out, cell), f"{self.took[-1] / 60:.1f} min"
        said = "; ".join(filter(None, (describe_end(self.plan.out, cell, status, error), minutes)))
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


def describe_end(out: Path, cell: Cell, status: Status, error: str | None) -> str:
    """Describe in a few words how far the run of a cell got."""
    ending, found = name_ending(status), {}
    if error is None:
        try:
            run = open_run(out, cell)
            found = read_lengths(run) if run is not None else {}
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
