"""What an analysis is: a module that measures a run, draws what it found, and says it in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import plotly.graph_objects as go

from lab.models import LanguageModel
from lab.runs import Run
from tasks.base import Batch


@dataclass(frozen=True)
class Subject:
    """What is analysed.

    Attributes:
        run: the run folder.
        model: at its newest checkpoint, on the CPU; with its initial weights when there is none.
        step: of these weights.
        checkpointed: whether they were read from a checkpoint.
        batch: the first row of the test split, tensors [1 t].
        baselines: test accuracy in [0, 1] of chance, of each shortcut and of the oracle, by name.
    """

    run: Run
    model: LanguageModel
    step: int
    checkpointed: bool
    batch: Batch
    baselines: dict[str, float]

    @property
    def name(self) -> str:
        """The task and the stack, the mixer's class in place of the latter's U."""
        config = self.run.model
        mixer = f" ({config.model})" if config.model else ""
        return f"{self.run.task.name} · {config.stack}{mixer}"


@dataclass(frozen=True)
class Words:
    """What stands beside a figure.

    Attributes:
        title: names the figure, its form and its pooling.
        says: one sentence on what to see, computed from the data.
        reading: how to read the figure.
        alt: what the figure shows, for who cannot see it.
    """

    title: str
    says: str
    reading: str
    alt: str


@runtime_checkable
class Analysis(Protocol):
    """A module of this package, listed in `analysis.ANALYSES`. Its file is all there is to add."""

    @property
    def TITLE(self) -> str:  # noqa: N802
        """The heading of its section."""
        ...

    def measure(self, subject: Subject, /) -> Sequence[Any]:
        """Return a result a figure, frozen dataclasses; none where the analysis does not apply."""
        ...

    def describe(self, result: Any, /) -> Words:
        """Put a result in words."""
        ...

    def draw(self, result: Any, /) -> go.Figure | None:
        """Draw a result, or return None when there is nothing to be seen."""
        ...
