"""What an analysis is: a module that measures a model on rows, draws what it found, says it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import plotly.graph_objects as go

from analysis.memory import check_memory
from lab.files import RunError
from lab.models import LanguageModel
from lab.training.runs import Run
from tasks.base import Batch, Task, count_rows

TOKENS = 32_768
"""Tokens of the rows that an analysis looks at, unless it is told how many rows."""
MOST_ROWS = 256
"""Rows that are enough, however short: intervals are then narrower than what they are about."""
FEWEST_ROWS = 4


class NotApplicableError(Exception):
    """An analysis has nothing to measure on this subject; the message says why."""


@dataclass(frozen=True)
class Subject:
    """What is analysed: a model, and rows to look at it on.

    Attributes:
        task: what the rows are of.
        model: in evaluation mode, on the device of the rows.
        batch: rows of the test split, tensors [b t].
        seed: of the rows, of resampling and of placebos.
        step: training steps behind the weights; None where nobody counted.
        run: the run folder they come from; None for a model from elsewhere.
    """

    task: Task
    model: LanguageModel
    batch: Batch
    seed: int = 0
    step: int | None = None
    run: Run | None = None

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        step: int | None = None,
        rows: int | None = None,
        memory: int | None = None,
    ) -> "Subject":
        """Return what is analysed of a run.

        Args:
            run: the run.
            step: whose weights, one of `run.list_steps()`; None takes the newest checkpoint's.
            rows: of the test split; None: about 32,768 tokens' worth, 4 to 256.
            memory: bytes that looking at them may take; None: what is free.

        Raises:
            RunError: when there is no checkpoint, or the weights cannot be read.
            ValueError: for rows below 1, or more than memory holds.
        """
        if step is None:
            if not run.list_checkpoints():
                known = ", ".join(map(str, run.list_steps()))
                raise RunError(f"{run.path}: has no checkpoint; give a step whose weights: {known}")
            step = max(run.list_checkpoints())
        if rows is None:
            rows = count_rows(TOKENS, run.task.seq_len, fewest=FEWEST_ROWS, most=MOST_ROWS)
        model = run.load_model(step)
        check_memory(model, rows, run.task.seq_len, memory)
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
        """The task and the stack, the mixer's class in place of the latter's U."""
        if self.run is None:
            return self.task.name
        config = self.run.model
        mixer = f" ({config.model})" if config.model else ""
        return f"{self.task.name} · {config.stack}{mixer}"


@dataclass(frozen=True)
class Passage:
    """A text, and how it goes on.

    Attributes:
        name: which it is.
        opening: what all continuations follow.
        continuations: by what they are.
    """

    name: str
    opening: str
    continuations: dict[str, str]


@dataclass(frozen=True)
class Words:
    """What stands beside a figure.

    Attributes:
        title: names the figure, its form and its pooling.
        says: one sentence on what to see, computed from the data.
        reading: how to read the figure.
        alt: what the figure shows, for who cannot see it.
        passages: texts to be read, which stand where there is no figure.
    """

    title: str
    says: str
    reading: str
    alt: str
    passages: tuple[Passage, ...] = ()


class Finding(ABC):
    """What an analysis found: numbers in the fields of a frozen dataclass, words, and a figure.

    `analysis.record.plain` must be able to write the fields as JSON.
    """

    @abstractmethod
    def describe(self) -> Words:
        """Put the finding in words."""

    @abstractmethod
    def draw(self) -> go.Figure | None:
        """Draw the finding; None when there is nothing to be seen."""


def describe(finding: Finding) -> Words:
    """Put a finding in words."""
    return finding.describe()


def draw(finding: Finding) -> go.Figure | None:
    """Draw a finding; None when there is nothing to be seen."""
    return finding.draw()


@runtime_checkable
class Analysis(Protocol):
    """A module of this package, listed in `analysis.ANALYSES`. Its file is all there is to add."""

    @property
    def TITLE(self) -> str:  # noqa: N802
        """The heading of its section."""
        ...

    def measure(self, subject: Subject, /) -> Sequence[Any]:
        """Return a result a figure: frozen dataclasses that `analysis.record.plain` takes.

        Raises:
            NotApplicableError: where there is nothing to measure.
        """
        ...

    def describe(self, result: Any, /) -> Words:
        """Put a result in words."""
        ...

    def draw(self, result: Any, /) -> go.Figure | None:
        """Draw a result, or return None when there is nothing to be seen."""
        ...
