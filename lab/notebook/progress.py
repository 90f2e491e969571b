"""Progress of training where it runs: a bar in a notebook's output, or on stderr."""

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lab.cli.tables.progress import show_progress
from lab.training.experiment import Plan
from lab.training.fit import Row
from lab.training.runs import Run

Callbacks = tuple[Callable[[Plan], None], Callable[[Row], None]]

EVERY = 0.2
"""Seconds between two updates."""


def choose_progress(run: Run) -> AbstractContextManager[Callbacks]:
    """Return a bar for the notebook that Python runs in, or else the command's on stderr."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return show_bar(run) if hasattr(shell, "kernel") else show_progress(run)


@contextmanager
def show_bar(run: Run) -> Iterator[Callbacks]:
    """Show a bar in the output of a notebook's cell; yields two callbacks.

    It fills once for each row length, since the number of steps is not known before.
    """
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    assert handle is not None
    seq_lens: tuple[int, ...] = (run.task.seq_len,)
    shown_at, held_out = 0.0, ""

    def show(share: float, text: str) -> None:
        line = f"{run.task.name}: {text}"
        handle.update(
            HTML(
                f'<progress max="1" value="{share:.3f}" style="width:16em"></progress> '
                f"<code>{html.escape(line)}</code>"
            )
        )

    def on_plan(plan: Plan) -> None:
        nonlocal seq_lens
        seq_lens = plan.seq_lens
        show(0.0, f"{plan.parameters:,} parameters on {plan.device} in {plan.precision}")

    def on_row(row: Row) -> None:
        nonlocal shown_at, held_out
        if row.validation_accuracy is not None:
            held_out = f", validation {row.validation_accuracy:.3f}"
        if time.monotonic() - shown_at < EVERY and row.test_accuracy is None:
            return
        shown_at = time.monotonic()
        done = seq_lens.index(row.seq_len) if row.seq_len in seq_lens else 0
        share = (done + row.accuracy) / len(seq_lens)
        show(
            1.0 if row.test_accuracy is not None else share,
            f"step {row.step:,}, rows of {row.seq_len:,} tokens, accuracy {row.accuracy:.3f}"
            + held_out,
        )

    yield on_plan, on_row
