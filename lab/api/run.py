"""A run as an object, its analyses and report; `lab.open`, `lab.analyze` and `lab.compare`."""

import html
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

from torch import nn

from analysis import QUICK
from analysis.base import Finding, Subject
from analysis.examination import Examination, examine, select_analyses
from analysis.pages.comparison import Comparison, choose_page, write_comparison
from analysis.pages.export import save_all
from analysis.pages.page import draw_figures
from analysis.pages.report import render, write_both, write_quick
from analysis.pages.report_files import ReportFiles, choose_work, find_page
from lab.api.options import AnalyzeOptions, CompareOptions
from lab.api.progress import show_count
from lab.api.results import describe_ending, format_accuracy, list_scores, open_run
from lab.files import MOST_PAGE, check_output, explain_write_errors, read
from lab.foreign import KINDS, OpenedModel, open_model
from lab.models import LanguageModel
from lab.training.run import Run
from tasks.base import Task

HEIGHT = 720
"""Height of a page in a notebook, px."""
GIBIBYTE = 2**30


@dataclass(frozen=True)
class Page:
    """A page of HTML that a notebook shows in a frame of its own, so that styles do not mix.

    Attributes:
        content: the whole page, which needs no network.
        where: the file that it is in, or what it says in words.
    """

    content: str = field(repr=False)
    where: str

    def _repr_html_(self) -> str:
        frame = html.escape(self.content, quote=True)
        style = f"width:100%;height:{HEIGHT}px;border:0"
        return f'<iframe srcdoc="{frame}" style="{style}"></iframe>'


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
        """The share of right answers on test rows, or explained variance; None if it diverged."""
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
        asked = (*names, *([only] if isinstance(only, str) else only))
        return analyze_run(
            self.run, AnalyzeOptions(path=self.path, only=asked, rows=rows, step=step)
        )

    def report(self) -> Page:
        """Return the run's report, after the quick analyses if there is none yet."""
        path = find_page(self.run)
        if path is None:
            with show_count(QUICK, "writing the report") as on_begin:
                path = write_quick(self.run, on_begin).page
        return Page(read(path, MOST_PAGE).decode(), str(path))

    def __repr__(self) -> str:
        lines = [f"{self.task.name}: has not ended"]
        if self.result:
            scores = list_scores(self.result)
            width = max(len(name) for name, _ in scores)
            lines = [f"{self.task.name}: test {self.task.measure}"]
            lines += [f"  {name:{width}}  {format_accuracy(value)}" for name, value in scores]
            lines.append(describe_ending(self.result))
        return "\n".join([*lines, f"run folder: {self.path}"])

    def _repr_html_(self) -> str:
        return f"<pre style='line-height:1.2'>{html.escape(repr(self))}</pre>"


class ShownAnalyses(Mapping[str, Sequence[Finding]]):
    """The findings of analyses by name; a notebook shows them as a page.

    Attributes:
        run: the run that was analysed.
        examination: what was found, and why the other analyses do not apply.
        files: the report's files in the run folder.
        figures: the files of figures that were saved besides.
    """

    def __init__(
        self, run: Run, examination: Examination, files: ReportFiles, figures: Sequence[Path]
    ):
        self.run, self.examination, self.files, self.figures = run, examination, files, figures

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


@overload
def open(what: Path | str, *, trust: bool = False) -> TrainedRun: ...
@overload
def open(what: str, model: nn.Module) -> OpenedModel: ...
def open(
    what: Path | str, model: nn.Module | None = None, *, trust: bool = False
) -> TrainedRun | OpenedModel:
    """Open a run folder, or a causal language model of another library.

    `lab.open("runs/mqar")` is the run that `lab.train` returned, or that the command trained.
    `lab.open("hf", model)` has what a model of the lab has: hook points, matrices, decoding.

    >>> import lab
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2,
    ...                      intermediate_size=32, num_attention_heads=2)
    >>> model = lab.open("hf", AutoModelForCausalLM.from_config(config).eval())
    >>> model
    OpenedModel of LlamaForCausalLM: 2 blocks, d_model 16, a vocabulary of 64
      blocks 0 to 1: LlamaAttention with a matrix, LlamaMLP

    Args:
        what: a run folder; or, before a model, the kind of the model: "hf" or "fla".
        model: a model of this kind (see `lab.foreign.open_model`).
        trust: import the code and read the text that a run names, although no command of yours is
            known to have named them.

    Raises:
        RunError: for a folder that holds no run.
        ValueError: for an unknown kind, or a model that cannot be opened.
        MissingPeerError: where the model's library is not installed.
    """
    if isinstance(what, nn.Module):
        raise ValueError(f'model={type(what).__name__}: give its kind first: lab.open("hf", model)')
    if model is not None:
        return open_model(str(what), model)
    if what in KINDS:
        raise ValueError(f'model=None: must be given after "{what}": lab.open("{what}", model)')
    return TrainedRun(open_run(Path(what), trust, partial(warnings.warn, stacklevel=3)))


def analyze(options: AnalyzeOptions, on_note: Callable[[str], None] = print) -> ShownAnalyses:
    """Run analyses of a run, add them to its report, and return what they found.

    The same as the command `lab analyze`.

    Args:
        options: which run, and what of it.
        on_note: called with a sentence on what goes to another file than usual, and why.

    Raises:
        ValueError: for an unknown name or step, or a file that the lab did not make.
        NotApplicableError: when one of the named analyses does not apply to this run.
        RunError: when the run cannot be read, or a file cannot be written.
    """
    return analyze_run(open_run(options.path, options.trust, on_note), options, on_note)


def analyze_run(
    run: Run, options: AnalyzeOptions, on_note: Callable[[str], None] = lambda text: None
) -> ShownAnalyses:
    """Do what `analyze` does, for a run that is open."""
    steps, step, figures = run.list_steps(), options.step, options.figures
    with run.share_checkpoints():
        select_analyses(options.only)
        if step is not None and step not in steps:
            known = ", ".join(map(str, steps))
            raise ValueError(f"step={step}: must be one of {known}, whose weights are kept")
        if figures is not None:
            with explain_write_errors(figures):
                figures.mkdir(parents=True, exist_ok=True)
        only, rows = choose_work(run, options.only or None, options.rows, step)
        memory = None if options.memory is None else int(options.memory * GIBIBYTE)
        with show_count(select_analyses(only), "analyzing") as on_begin:
            subject = Subject.of(run, step=step, rows=rows, memory=memory, only=only)
            try:
                examination = examine(subject, only, on_begin)
            except ValueError as error:  # the options are valid: this is a fault of the analysis
                raise RuntimeError(f"an analysis failed: {error}") from error
        files = write_both(run, examination, on_note)
        saved = {}
        if figures is not None:
            drawn = draw_figures(examination)
            saved = {figures / f"{name}.{options.format}": fig for name, fig in drawn.items()}
            for file in saved:
                check_output("figures", file, options.force)
            with explain_write_errors(figures):
                save_all(saved)
        return ShownAnalyses(run, examination, files, [*saved])


def compare(
    options: CompareOptions, on_note: Callable[[str], None] = print
) -> tuple[Comparison, Path]:
    """Compare runs on one page; return what was found, and the file of the page.

    Raises:
        ValueError: for runs that cannot be compared, or a file that the lab did not make.
        RunError: when a run cannot be read, or the page cannot be written.
    """
    with ExitStack() as held:
        if options.out is not None:
            check_output("out", options.out, options.force)
        runs = [open_run(path, options.trust, on_note) for path in options.paths]
        for run in runs:
            held.enter_context(run.share_checkpoints())
        out = options.out or choose_page(runs, options.rows)
        return write_comparison(runs, out, options.rows), out
