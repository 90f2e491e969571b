"""What a task is: rows, each a pure function of (task, seed, split, row number)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, get_type_hints

from tasks import counter
from tasks.batch import (
    IGNORE,
    Batch,
    Links,
    Predictor,
    Surprisal,
    accuracy,
    count_right,
    count_rows,
    find_scored,
)
from tasks.bounds import check_choice, check_kind
from tasks.lazy import Tensor, torch
from tasks.near_names import suggest
from tasks.one_thread import use_one_thread
from tasks.schedule import Schedule

BLIND_ROWS = 256
"""Test rows on which the loss of answering zero is measured."""
MAX_ROWS = 2**36
"""Rows of a split: the counter behind them has 36 bits for the number."""

T = TypeVar("T")


@dataclass(frozen=True)
class Preset:
    """Options by name that make a task a certain size.

    Attributes:
        options: fields of the task; the rest keep their defaults.
        source: where the size comes from.
        stack: layers that learn it, in stack notation, where the usual ones do not.
        layers: options of these layers, as `lab.config.ModelConfig.options`.
        seconds: of training on one thread until it was learned (LOG.md); None if not known.
    """

    options: Mapping[str, Any]
    source: str
    stack: str | None = None
    layers: Mapping[str, Any] = field(default_factory=dict)
    seconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A synthetic task: a frozen dataclass whose fields are its options.

    A field is an `option`, which has a help text for the command line.

    An option may also be given several values (a tuple or list) or a `Schedule`: the class then
    returns a `tasks.mixture.Mixture`, which holds one task for each setting.

    Attributes:
        name: in `tasks.TASKS`, and of its command.
        role_names: what a position can be; the last is also the role of padding.
        splits: kinds of rows, which never share random bits; "validation" decides when training
            goes on to longer rows or ends, "test" decides what the trained model is worth.
        separates: what the task tells apart, in a few words.
        presets: "small", which two CPU cores learn in minutes, and "published".
        evaluations: options and the values beyond training that a run is evaluated at by default.
        stochastic: whether rows do not determine their targets; the oracle is then the best
            possible, not always right.
        unit: what a token is, where bits are counted.
        vectors: whether rows are vectors and answers are numbers (`tasks.vectors.VectorTask`).
        measure: what its score in [0, 1] is called.
        loss_unit: what its loss is measured in.
        grows: options that `resize` scales; none where shorter rows would be no easier start.
        why_fixed: why a task that does not grow does not.
    """

    name: ClassVar[str]
    role_names: ClassVar[tuple[str, ...]]
    splits: ClassVar[tuple[str, ...]] = ("train", "test", "validation")
    separates: ClassVar[str]
    presets: ClassVar[Mapping[str, Preset]]
    evaluations: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    stochastic: ClassVar[bool] = False
    unit: ClassVar[str] = "token"
    vectors: ClassVar[bool] = False
    measure: ClassVar[str] = "accuracy"
    loss_unit: ClassVar[str] = "nats"
    grows: ClassVar[tuple[str, ...]] = ("seq_len",)
    why_fixed: ClassVar[str] = ""

    seq_len: int
    vocab_size: int

    def __new__(cls: type[T], **options: Any) -> T:
        """Return a task or, where options vary over the rows, a mixture of tasks."""
        from tasks.mixture import Mixture, select_varied  # it imports this module

        if select_varied(cls, options):
            return Mixture(kind=cls, given=tuple(options.items()))  # type: ignore[return-value]
        return object.__new__(cls)

    def __post_init__(self):
        hints = _get_hints(type(self))
        for f in fields(self):
            if f.init:
                check_kind(f.name, getattr(self, f.name), hints[f.name])
        self.validate()

    @abstractmethod
    def validate(self) -> None:
        """Check the bounds of the options, and set the fields that follow from others.

        Raises:
            ValueError: naming field, value and bound.
        """

    @abstractmethod
    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b], ≥ 0) on the device of `numbers`."""

    @abstractmethod
    def oracle(self, batch: Batch) -> Tensor:
        """Return the right answers, int64 [b t] (-100 unscored), by plain code from the inputs.

        Where the inputs do not determine them, a task's own docstring says which links it also
        reads: those that hold its facts, its automaton or its place in a text.
        """

    @property
    @abstractmethod
    def chance(self) -> float:
        """The accuracy of a uniform guess over the legal answers, in [0, 1]."""

    @abstractmethod
    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without solving the task, by name."""

    def surprisals(self) -> dict[str, Surprisal]:
        """Return predictors that give every token a probability, by name; none for most tasks.

        "oracle" is one that knows how rows are made: no predictor takes fewer bits in the mean.
        """
        return {}

    @property
    def sizes(self) -> dict[str, Any]:
        """What a model must know to read and answer rows: arguments of `lab.models.build`."""
        return {"vocab_size": self.vocab_size}

    @property
    def blind_loss(self) -> float:
        """The loss of a guess that is blind to the row: uniform over all tokens, or zero.

        Zero, where answers are numbers, costs the mean square of the first test rows' targets.
        """
        if not self.vectors:
            return math.log(self.vocab_size)
        targets = self.batch(split="test", size=BLIND_ROWS).targets
        return targets.double().square().nanmean().item()

    def count_asked(self, batch: Batch) -> Tensor:
        """Return how much there is to get right in each row, [b].

        It is the number of scored positions; where answers are numbers, what the oracle explains.
        """
        best = self.oracle(batch) if self.vectors else batch.targets
        return count_right(best, batch.targets)

    def format_token(self, token: int) -> str:
        """Return how a token is shown."""
        return str(token)

    def to_str_tokens(self, tokens: "Tensor | Sequence[int]") -> list[str]:
        """Return how the tokens of a row are shown, [t] or [1 t]; `to_tokens` reverses it."""
        row = torch.as_tensor(tokens)
        row = row.flatten(0, -2) if self.vectors else row.flatten()
        return [self.format_token(token) for token in row.tolist()]

    def to_tokens(self, text: "str | Sequence[str]") -> Tensor:
        """Return the tokens of a row that is written as text, int64 [1 t].

        Args:
            text: tokens as `format_token` shows them: a list, or one string with spaces between.

        Raises:
            ValueError: for what is not a token of this task, which no text is where rows are
                vectors.
        """
        if self.vectors:
            raise ValueError(f"text: rows of {self.name} are vectors, which no text spells")
        known = {self.format_token(token): token for token in range(self.vocab_size)}
        words = text.split() if isinstance(text, str) else list(text)
        for word in words:
            if word not in known:
                some = ", ".join([*known][:8])
                raise ValueError(f"text: {word!r} is not a token of {self.name}, such as {some}")
        return torch.tensor([[known[word] for word in words]], dtype=torch.int64)

    def list_tasks(self, batch: Batch) -> "list[Task]":
        """Return the task of each row of a batch; their `format_token` shows the row's tokens."""
        return [self] * len(batch.inputs)

    @property
    def options(self) -> dict[str, Any]:
        """The options by name: enough to rebuild the task."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def describe(self) -> dict[str, Any]:
        """Return the name and the options, ready for JSON; `tasks.restore` rebuilds the task."""
        options = {
            name: vars(value) if isinstance(value, Schedule) else value
            for name, value in self.options.items()
        }
        return {"name": self.name, **options}

    def replace(self, **options: Any) -> "Task":
        """Return the task with other values of some options.

        Raises:
            ValueError: for a name that is not an option, or a value out of its bounds.
        """
        known = self.options
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r} of {self.name}. {suggest(name, known)}")
        return type(self)(**{**known, **options})

    def resize(self, seq_len: int) -> "Task":
        """Return the task in rows of another length, for training that starts with short rows.

        The options in `grows` are scaled by the same factor, rounded down; all others stay.

        Raises:
            ValueError: for a task that does not grow, or whose rows vary in length or follow a
                schedule; for a length at which the options are out of their bounds.
        """
        if not self.grows:
            raise ValueError(
                f"seq_len={seq_len}: {self.name} cannot shorten its rows: {self.why_fixed}"
            )
        now = self.options
        return self.replace(**{name: self._scale(name, now[name], seq_len) for name in self.grows})

    def _scale(self, name: str, value: Any, seq_len: int) -> Any:
        """Return the value of an option at another row length."""
        return value * seq_len // self.seq_len

    def batch(
        self,
        *,
        split: str = "train",
        start: int = 0,
        size: int,
        seed: int = 0,
        device: "torch.device | str" = "cpu",
    ) -> Batch:
        """Return rows start … start + size − 1 of a split.

        Raises:
            ValueError: for an unknown split, a negative start, a size below 1, or rows past the
                end of the split.
        """
        check_choice("split", split, self.splits)
        if start < 0:
            raise ValueError(f"start={start}: must be ≥ 0")
        if size < 1:
            raise ValueError(f"size={size}: must be ≥ 1")
        if start + size > MAX_ROWS:
            raise ValueError(f"start={start}, size={size}: a split has {MAX_ROWS} rows")
        with use_one_thread():
            return self.generate(split, torch.arange(start, start + size, device=device), seed)

    def draw_words(self, split: str, numbers: Tensor, seed: int, count: int) -> Tensor:
        """Draw `count` random words for each row, int64 [b count]: all that rows are made of."""
        key = counter.derive_key(self.name, seed)
        return counter.draw_words(key, self.splits.index(split), numbers, count)


@lru_cache(maxsize=64)
def _get_hints(kind: type[Task]) -> dict[str, Any]:
    """Return a class's annotations, looked up once: a schedule makes a task for every stage."""
    return get_type_hints(kind)


__all__ = [
    "IGNORE",
    "MAX_ROWS",
    "Batch",
    "Links",
    "Predictor",
    "Preset",
    "Schedule",
    "Surprisal",
    "Task",
    "accuracy",
    "count_right",
    "count_rows",
    "find_scored",
]
