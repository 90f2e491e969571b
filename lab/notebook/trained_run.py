"""A run as an object: its model, its result, its analyses and its report."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis import QUICK
from analysis.base import Finding, Subject
from analysis.examination import Examination, examine, select_analyses
from analysis.pages.report import render, write_both, write_quick
from analysis.pages.report_files import choose_work, find_page
from lab.cli.tables.progress import show_count
from lab.cli.tables.results import build_result_table, describe_ending
from lab.models import LanguageModel
from lab.notebook.page import Page
from lab.training.run import Run
from tasks.base import Task

WIDTH = 100
"""Columns of a result."""


class TrainedRun:
    """A run that has been trained, on disk in `path`.

    Attributes:
        run: the run folder.
        result: the content of result.json: accuracy, steps, seconds, how it ended; empty before.
    """

    def __init__(self, run: Run):
        self.run = run
        self.result: dict[str, Any] = run.read_result() or {}

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.run.path

    @property
    def task(self) -> Task:
        """The task: `task.batch(...)` makes rows, `task.to_str_tokens(row)` shows one."""
        return self.run.task

    @property
    def accuracy(self) -> float | None:
        """The share of right answers on test rows; None for a run that diverged."""
        return self.result.get("accuracy")

    @cached_property
    def model(self) -> LanguageModel:
        """The trained model, in evaluation mode, on the CPU."""
        return self.run.load_model(max(self.run.list_checkpoints(), default=0))

    @cached_property
    def subject(self) -> Subject:
        """What analyses take: the newest weights, and rows of the test split."""
        return Subject.of(self.run)

    def analyze(
        self,
        *names: str,
        only: str | Sequence[str] = (),
        rows: int | None = None,
        step: int | None = None,
    ) -> "ShownAnalyses":
        """Run analyses, add them to the run's report, and return what they found.

        Args:
            names: in `analysis.ANALYSES`; none: all that apply.
            only: further names, for readers of `lab analyze --only`.
            rows: of the test split; None: by their length.
            step: of the weights; None: the newest.

        Raises:
            ValueError: for an unknown name or step, or rows below 1.
            NotApplicableError: when one of these names does not apply to this run.
        """
        steps = self.run.list_steps()
        if step is not None and step not in steps:
            known = ", ".join(map(str, steps))
            raise ValueError(f"step={step}: must be one of {known}, whose weights are kept")
        asked = [*names, *([only] if isinstance(only, str) else only)]
        wanted = select_analyses(asked) if asked else None
        chosen, rows = choose_work(self.run, wanted, rows, step)
        with show_count(select_analyses(chosen), "analyzing") as on_begin:
            subject = Subject.of(self.run, step=step, rows=rows, only=chosen)
            examination = examine(subject, chosen, on_begin)
        write_both(self.run, examination)
        return ShownAnalyses(self.run, examination)

    def report(self) -> Page:
        """Return the run's report, after the quick analyses if there is none yet."""
        path = find_page(self.run)
        if path is None:
            with show_count(QUICK, "writing the report") as on_begin:
                path = write_quick(self.run, on_begin).page
        return Page(path.read_text(encoding="utf-8"), str(path))

    def __repr__(self) -> str:
        return self._print().export_text().rstrip()

    def _repr_html_(self) -> str:
        return self._print().export_html(
            inline_styles=True,
            code_format="<pre style='font-family:monospace;line-height:1.2'>{code}</pre>",
        )

    def _print(self) -> Console:
        # In a notebook rich would show what is printed at once, whatever the file.
        console = Console(
            record=True,
            file=StringIO(),
            width=WIDTH,
            markup=False,
            emoji=False,
            force_jupyter=False,
        )
        if self.result:
            console.print(build_result_table(self.result))
            console.print(describe_ending(self.result))
        else:
            console.print(f"{self.task.name}: has not ended")
        console.print(f"run folder: {self.path}")
        return console


class ShownAnalyses(Mapping[str, Sequence[Finding]]):
    """The findings of analyses by name; a notebook shows them as a page.

    Attributes:
        run: the run that was analysed.
        examination: what was found, and why the other analyses do not apply.
    """

    def __init__(self, run: Run, examination: Examination):
        self.run, self.examination = run, examination

    def __getitem__(self, name: str) -> Sequence[Finding]:
        return self.examination.results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.examination.results)

    def __len__(self) -> int:
        return len(self.examination.results)

    def __repr__(self) -> str:
        return "\n".join(
            f"{name}: {finding.says}" for name, findings in self.items() for finding in findings
        )

    def _repr_html_(self) -> str:
        return Page(render(self.run, self.examination), repr(self))._repr_html_()
