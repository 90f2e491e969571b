"""Progress of a command while it runs, on stderr."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.lengthening import explain_start_length, list_stages
from lab.training.experiment import Plan
from lab.training.fit import Row
from lab.training.runs import Run

MEASURED_STEPS = range(4, 13)
"""Steps whose median time estimates the cost: after the warm-up, and soon enough."""
ROOM_FOR_A_BAR = 110
"""Least columns of a terminal that has room for a bar."""
RECENT_STEPS = 50
"""Number of last steps whose median time is shown."""


@contextmanager
def show_progress(run: Run) -> Iterator[tuple[Callable[[Plan], None], Callable[[Row], None]]]:
    """Show the plan, the cost measured on the first steps, and a live bar; yields two callbacks.

    Without a terminal there is no bar, and each evaluation prints a line.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    columns = [MofNCompleteColumn(), TextColumn("{task.description}", markup=False)]
    if console.width >= ROOM_FOR_A_BAR:
        columns[1:1] = [BarColumn(bar_width=None)]
    bar = Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
    )
    last_step = run.train.max_steps
    shown = bar.add_task("", total=last_step, visible=False)
    first: list[float] = []
    recent: deque[float] = deque(maxlen=RECENT_STEPS)
    held_out, slowing = "", 1.0

    def on_plan(plan: Plan) -> None:
        nonlocal slowing
        slowing = plan.slowing
        model = run.model.model or run.model.stack
        console.print(
            f"{run.task.name}: {model}, {plan.parameters:,} parameters, on {plan.device} in "
            f"{plan.precision}, {run.train.optimizer}, {run.train.batch_size} rows per step; "
            f"run folder {run.path}"
        )
        if len(plan.seq_lens) > 1:
            console.print(
                f"row length: {' → '.join(f'{n:,}' for n in plan.seq_lens)} tokens, longer "
                f"whenever {run.train.lengthen_at:.1%} of the validation answers are right"
            )
        why = explain_start_length(run.task, run.train)
        if why:
            first = list_stages(run.task, run.train)[0].task.seq_len
            console.print(f"the first rows have {first:,} tokens and not fewer: {why}")
        if plan.first_step:
            console.print(f"resuming after step {plan.first_step:,}")
        bar.update(shown, completed=plan.first_step, visible=True)

    def on_row(row: Row) -> None:
        nonlocal held_out
        recent.append(row.seconds)
        steps_left = last_step - row.step
        if len(first) < MEASURED_STEPS.stop:
            first.append(row.seconds)
            if len(first) == MEASURED_STEPS.stop:
                console.print(_describe_cost(first, steps_left, slowing))
        each = median(recent)
        if row.validation_accuracy is not None:
            held_out = f"  validation {row.validation_accuracy:.3f}"
        if row.test_accuracy is not None:
            held_out = f"  test {row.test_accuracy:.3f}"
        slowest = each if row.seq_len == run.task.seq_len else each * max(1.0, slowing)
        text = (
            f"T {row.seq_len:,}  loss {row.loss:.3f}  accuracy {row.accuracy:.3f}{held_out}  "
            f"{1000 * each:,.0f} ms  ≤ {format_duration(steps_left * slowest)}"
        )
        bar.update(shown, completed=row.step, description=text)
        if not console.is_terminal and row.validation_accuracy is not None:
            console.print(f"step {row.step:,}  {text}")

    with bar:
        yield on_plan, on_row


@contextmanager
def show_count(names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Show a live bar over named steps; yields a function to call when a step begins."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        shown = bar.add_task("", total=len(names), completed=-1)

        def on_begin(name: str) -> None:
            bar.update(shown, advance=1, description=name)

        yield on_begin
        bar.update(shown, completed=len(names), description="done")


def _describe_cost(times: list[float], steps_left: int, slowing: float) -> str:
    each = median(times[i] for i in MEASURED_STEPS)
    longest = each * max(1.0, slowing)
    later = f", {1000 * longest:,.0f} ms at full length" if longest > each else ""
    return (
        f"measured {1000 * each:,.0f} ms per step{later}: the {steps_left:,} steps left take at "
        f"most {format_duration(longest * steps_left)}, not counting evaluations; Ctrl-C stops, "
        "the same command resumes"
    )


def format_duration(seconds: float) -> str:
    """Return a length of time in the two units that matter: "3 d 4 h", "2 min 5 s"."""
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for i, (name, size) in enumerate(units[:-1]):
        if seconds >= size:
            finer, unit = units[i + 1]
            return f"{seconds // size:.0f} {name} {seconds % size // unit:.0f} {finer}"
    return f"{seconds:.0f} s"
