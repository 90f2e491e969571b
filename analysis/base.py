"""The contract of an analysis: it measures a subject and returns findings with words and figure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import plotly.graph_objects as go

from analysis.memory import check_memory
from lab.files import RunError
from lab.models import LanguageModel
from lab.models.evaluation import check_sizes
from lab.training.run import Run
from tasks.base import Batch, Task, count_rows

TOKENS = 32_768
"""Tokens that an analysis runs the model on, unless the number of rows is given."""
MOST_ROWS = 256
"""Maximum number of rows by default, however short: 95 % intervals are narrow enough then."""
FEWEST_ROWS = 4
Item = TypeVar("Item")


class NotApplicableError(Exception):
    """An analysis has nothing to measure on this subject; the message says why."""


@dataclass(frozen=True)
class Subject:
    """What an analysis looks at: a model, and rows to run it on.

    >>> from analysis import matrices
    >>> from lab.models import build
    >>> from tasks import TASKS
    >>> task = TASKS["mqar"](seq_len=16, n_pairs=2, vocab_size=32)
    >>> model = build("AM SM", vocab_size=32, d_model=16).eval()
    >>> subject = Subject(task, model, task.batch(split="test", size=4))
    >>> attention, ssd = matrices.measure(subject)
    >>> sentence, figure = attention.says, attention.figure()

    Attributes:
        model: in evaluation mode, on the device of the rows.
        batch: rows of the test split, tensors [b t].
        seed: of the rows, of resampling and of placebos.
        step: training steps of the weights; None if unknown.
        run: the run folder of the weights; None for a model from elsewhere.
        known: what one analysis has found that others ask for too, by name.

    Raises:
        ValueError: for a task whose rows the model does not read.
    """

    task: Task
    model: LanguageModel
    batch: Batch
    seed: int = 0
    step: int | None = None
    run: Run | None = None
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        check_sizes(self.task, self.model)

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        step: int | None = None,
        rows: int | None = None,
        memory: int | None = None,
        only: Sequence[str] | None = None,
    ) -> "Subject":
        """Return the subject of a run: its weights at a step, and rows of its task.

        Args:
            step: the step of the weights, one of `run.list_steps()`; None: the newest checkpoint.
            rows: how many rows of the test split; None: about 32,768 tokens, 4 to 256 rows.
            memory: bytes that the analyses may take; None: all that are free.
            only: names of the analyses that it is for; None: all.

        Raises:
            RunError: when there is no checkpoint, or the weights cannot be read.
            ValueError: for rows below 1, or more than fit into memory.
        """
        if step is None:
            if not run.list_checkpoints():
                known = ", ".join(map(str, run.list_steps()))
                raise RunError(f"{run.path}: has no checkpoint; give a step: {known}")
            step = max(run.list_checkpoints())
        if rows is None:
            rows = count_default_rows(run.task)
        model = run.load_model(step)
        check_memory(model, run.task, rows, memory, only)
        return cls(
            task=run.task,
            model=model,
            batch=run.task.batch(split="test", size=rows, seed=run.train.seed),
            seed=run.train.seed,
            step=step,
            run=run,
        )

    @property
    def name(self) -> str:
        """The task and the stack, with the class of the user's mixer if there is one."""
        if self.run is None:
            return self.task.name
        return f"{self.task.name} · {self.run.model.name}"


def check_tokens(subject: Subject) -> None:
    """Check that rows are tokens, for what looks at tokens or at right and wrong answers.

    Raises:
        NotApplicableError: where rows are vectors.
    """
    if subject.task.vectors:
        raise NotApplicableError(f"rows of {subject.task.name} are vectors, not tokens")


def count_default_rows(task: Task) -> int:
    """Return how many rows an analysis takes by default: about 32,768 tokens, 4 to 256 rows."""
    return count_rows(TOKENS, task.seq_len, fewest=FEWEST_ROWS, most=MOST_ROWS)


def thin(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` of the items, evenly spaced, with the first and the last.

    Raises:
        ValueError: for `most` below 1.
    """
    if most < 1:
        raise ValueError(f"{most=} must be at least 1")
    kept = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[i] for i in kept]


@dataclass(frozen=True)
class Passage:
    """A text with several continuations.

    Attributes:
        continuations: by their origin, such as the task or the model.
    """

    name: str
    opening: str
    continuations: dict[str, str]


@dataclass(frozen=True)
class Passages:
    """Texts to read, shown in place of a figure."""

    texts: tuple[Passage, ...]


@dataclass(frozen=True)
class TokenText:
    """A row to look at token by token, as JSON, shown in place of a figure."""

    row: dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A small table of numbers that stands beside a figure.

    Attributes:
        rows: texts, one for each column.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Finding(ABC):
    """What an analysis found: numbers in the fields of a frozen dataclass, a caption and a figure.

    `analysis.plain.to_plain` must be able to convert the fields for analysis.json.

    Attributes:
        title: of the figure; the same for every model, or a field where it names a layer.
        reading: how to read the figure; the same for every model.
    """

    title: str
    reading: str = ""

    @property
    @abstractmethod
    def says(self) -> str:
        """What the finding shows: one sentence with the numbers."""

    @property
    def alt(self) -> str:
        """The figure in words, for readers who cannot see it."""
        return f"{self.title}. {self.says}"

    def numbers(self) -> Table | None:
        """Return further numbers, which stand beside the figure; None if there are none."""
        return None

    def figure(self) -> go.Figure | Passages | TokenText | None:
        """Return the figure, or what is read in its place; None when there is nothing to see."""
        return None


@runtime_checkable
class Analysis(Protocol):
    """A module with `TITLE` and `measure`, listed in `analysis.ANALYSES`.

    To add an analysis, write its file and one line there; the report and `lab analyze` follow.
    """

    @property
    def TITLE(self) -> str:  # noqa: N802
        """The heading of its section in the report."""
        ...

    def measure(self, subject: Subject, /) -> Sequence[Finding]:
        """Return the findings, one for each figure.

        Raises:
            NotApplicableError: when there is nothing to measure.
        """
        ...
