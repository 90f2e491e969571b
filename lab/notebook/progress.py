"""Progress of training where it runs: a bar in a notebook's output, or on stderr."""

import html
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lab.cli.tables.progress import TrainingDisplay, show_progress
from lab.training.experiment import Plan
from lab.training.loop import Row
from lab.training.run import Run

EVERY = 0.2
"""Seconds between two updates."""


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
            self._show(f"{about}, accuracy {row.accuracy:.3f}{self.held_out}")

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
