"""Progress of a command while it runs, on stderr."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lab.cli.console import open_console
from lab.cli.tables.durations import format_duration
from lab.lengthening import explain_start_length, list_stages
from lab.training.experiment import Plan
from lab.training.loop import Row
from lab.training.run import Run

RECENT_STEPS = 50
"""Number of last steps whose median time is shown."""


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
            f"{run.task.name}: {run.model.model or run.model.stack}, {plan.parameters:,} "
            f"parameters, {run.train.optimizer}, {tokens:,} tokens per step"
        )
        write(f"on {plan.device} in {describe_choice(plan)}")
        write(f"run folder: {run.path}", soft_wrap=True)
        if plan.certified:
            write(f"certified: {plan.certified}")
        if len(plan.seq_lens) > 1:
            until = (
                f"whenever {100 * run.train.lengthen_at:.1f} % of the validation answers are right"
            )
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
            f"{row.seq_len:,} tokens  loss {row.loss:.3f}  accuracy {row.accuracy:.3f}"
            f"{self.held_out}  {1000 * each:,.0f} ms"
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
