"""Tasks of vectors: a model reads them by a linear map, and answers with numbers."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tasks.base import Task

MOST_SHOWN = 3
"""Numbers of a vector that are shown."""


@dataclass(frozen=True, kw_only=True)
class VectorTask(Task):
    """A task whose rows are vectors in place of tokens, and whose answers are numbers.

    Inputs are float32 [b t i] and targets float32 [b t o], all NaN where unscored, with i =
    `d_input` and o = `d_output`. Oracle and shortcuts answer in the targets' shape. The loss is the
    mean of the squared errors. In place of accuracy there is the explained variance

        (Σy² − Σ(y − ŷ)²) / (Σy² − Σ(y − y*)²),   clipped to [0, 1],

    over all numbers y of all scored positions, with the model's answers ŷ and the oracle's y*. It
    is 0 for answering zero, the blind guess of numbers whose mean is 0, and 1 for the oracle, also
    where no model can do without error.
    """

    vectors: ClassVar[bool] = True
    measure: ClassVar[str] = "explained variance"
    loss_unit: ClassVar[str] = "squared error"

    vocab_size: int = field(init=False, default=0)

    @property
    @abstractmethod
    def d_input(self) -> int:
        """Numbers of an input vector."""

    @property
    def d_output(self) -> int:
        """Numbers of an answer."""
        return 1

    @property
    def sizes(self) -> dict[str, Any]:
        """What a model must know to read and answer rows: arguments of `lab.models.build`."""
        return {"d_input": self.d_input, "d_output": self.d_output}

    @property
    def chance(self) -> float:
        """The explained variance of answering zero: 0."""
        return 0.0

    def format_token(self, token: Any) -> str:
        """Return how a vector is shown: its first numbers that are not 0, to two decimals."""
        numbers = [f"{number:.2f}" for number in token if number]
        return " ".join([*numbers[:MOST_SHOWN], *["…"] * (len(numbers) > MOST_SHOWN)]) or "0"
