"""What a task is: rows of tokens, each a pure function of (task, seed, split, row number)."""

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, ClassVar, TypeVar, get_type_hints

from tasks import counter
from tasks.batch import IGNORE, Batch, Links, accuracy, joined
from tasks.bounds import of_kind
from tasks.lazy import Tensor, torch
from tasks.varying import Schedule

MAX_ROWS = 2**36
"""Rows of a split: the counter behind them has 36 bits for the number."""
MAX_SETTINGS = 4096
"""Settings that the varied options of a task may make together."""

T = TypeVar("T")
Predictor = Callable[[Batch], Tensor]
"""A rule that predicts int64 [b t] from a batch's inputs; scored like a model."""


class _Varying(ABCMeta):
    """Lets a task's class be called with several values for an option, or a schedule."""

    def __call__(cls: type[T], **options: Any) -> T:
        varied = {
            f.name: tuple(options[f.name]) if isinstance(options[f.name], list) else options[f.name]
            for f in fields(cls)  # type: ignore[arg-type]
            if isinstance(options.get(f.name), (tuple, list, Schedule))
        }
        if not varied:
            return type.__call__(cls, **options)
        steps = [_values(name, values) for name, values in varied.items()]
        count = prod(map(len, steps))
        if count > MAX_SETTINGS:
            names = ", ".join(varied)
            raise ValueError(f"{names}: make {count} settings together, must be ≤ {MAX_SETTINGS}")
        parts = tuple(
            type.__call__(cls, **{**options, **dict(zip(varied, setting, strict=True))})
            for setting in product(*steps)
        )
        task = copy(parts[-1])
        widest = {n: max(getattr(part, n) for part in parts) for n in ("seq_len", "vocab_size")}
        vars(task).update(widest, varied=tuple(varied.items()), parts=parts)
        return task


@dataclass(frozen=True)
class Preset:
    """Options by name that make a task a certain size.

    Attributes:
        options: fields of the task; the rest keep their defaults.
        source: where the size comes from.
        stack: layers that learn it, in stack notation, where the usual ones do not.
    """

    options: Mapping[str, Any]
    source: str
    stack: str | None = None


@dataclass(frozen=True, kw_only=True)
class Task(metaclass=_Varying):
    """A synthetic task: a frozen dataclass whose fields are its options.

    A field's `metadata["help"]` is its text on the command line. Subclasses hold their fields to
    their bounds in `check`, which raises `ValueError` naming field, value and bound.

    Any option may vary over the rows: a tuple is a mixture, of which each row takes one value, and
    a `Schedule` goes from one value to another over the training rows. The task then consists of
    `parts`, one a setting; a row is one of the part that its number picks, padded at the end
    to the longest part's length, with role −1 of `role_names`, and `links["setting"]` [b 1] says
    which. The fields themselves hold the last part's values, seq_len and vocab_size the largest.

    Attributes:
        name: in `tasks.TASKS`, and of its command.
        role_names: what a position can be; the last is what padding is.
        splits: whose rows never share a number's bits; "validation" says when training goes on to
            longer rows or ends, "test" what the trained model is worth.
        separates: what the task tells apart, in a few words.
        presets: "small", which two CPU cores learn in minutes, and "published".
        evaluations: options and the values beyond training that a run is evaluated at by default.
        stochastic: whether rows do not settle their targets; the oracle is then the best there is.
        unit: what a token is, where bits are counted.
        grows: options that `at_length` scales; none where shorter rows would be no easier start.
        why_fixed: why a task that does not grow does not.
        varied: options that vary over the rows, with their mixture or schedule.
        parts: the task of each setting of those; none where nothing varies.
    """

    name: ClassVar[str]
    role_names: ClassVar[tuple[str, ...]]
    splits: ClassVar[tuple[str, ...]] = ("train", "test", "validation")
    separates: ClassVar[str]
    presets: ClassVar[Mapping[str, Preset]]
    evaluations: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    stochastic: ClassVar[bool] = False
    unit: ClassVar[str] = "token"
    grows: ClassVar[tuple[str, ...]] = ("seq_len",)
    why_fixed: ClassVar[str] = ""

    seq_len: int
    vocab_size: int
    varied: tuple[tuple[str, tuple[Any, ...] | Schedule], ...] = field(init=False, default=())
    parts: tuple["Task", ...] = field(init=False, default=(), repr=False, compare=False)

    def __post_init__(self):
        hints = _hints(type(self))
        for f in fields(self):
            if f.init:
                of_kind(f.name, getattr(self, f.name), hints[f.name])
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Hold the options to their bounds, and set the fields that follow from others.

        Raises:
            ValueError: naming field, value and bound.
        """

    @abstractmethod
    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b], ≥ 0) on the device of `numbers`."""

    @abstractmethod
    def solve(self, batch: Batch) -> Tensor:
        """Return the right answers, int64 [b t], by plain code from what `oracle` may read."""

    @property
    @abstractmethod
    def guess(self) -> float:
        """The accuracy of a uniform guess over the legal answers, in [0, 1]."""

    @abstractmethod
    def rules(self) -> dict[str, Predictor]:
        """Return rules that look right without solving the task, by name."""

    def text(self, token: int) -> str:
        """Return how a token is shown; of a mixture's row, ask the part that it is of."""
        return str(token)

    def parts_of(self, batch: Batch) -> "list[Task]":
        """Return the task that each row of a batch is of: where options vary, one of the parts."""
        if not self.varied:
            return [self] * len(batch.inputs)
        return [self.parts[setting] for setting in batch.links["setting"][:, 0].tolist()]

    def options(self) -> dict[str, Any]:
        """Return the options by name, varied ones as given: enough to rebuild the task."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init} | dict(self.varied)

    def described(self) -> dict[str, Any]:
        """Return the name and the options, ready for JSON; `tasks.described` takes it back."""
        options = {
            name: vars(value) if isinstance(value, Schedule) else value
            for name, value in self.options().items()
        }
        return {"name": self.name, **options}

    def changed(self, **options: Any) -> "Task":
        """Return the task with other values of some options.

        Raises:
            ValueError: for a name that is no option, or a value out of its bounds.
        """
        known = self.options()
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r}; {self.name} has {', '.join(known)}")
        return type(self)(**{**known, **options})

    def at_length(self, seq_len: int) -> "Task":
        """Return the task in rows of another length, for training that starts with short rows.

        The options in `grows` are scaled by the same factor, rounded down; all others stay.

        Raises:
            ValueError: for a task that does not grow, rows that a schedule changes or whose length
                varies already, or a length at which the options are out of their bounds.
        """
        if not self.grows:
            raise ValueError(f"seq_len={seq_len}: {self.name} does not grow: {self.why_fixed}")
        for name, values in self.varied:
            if name == "seq_len" or isinstance(values, Schedule):
                raise ValueError(f"seq_len={seq_len}: {name} already varies over the rows")
        now = self.options()
        return self.changed(**{name: self._scaled(name, now[name], seq_len) for name in self.grows})

    def _scaled(self, name: str, value: Any, seq_len: int) -> Any:
        """Return an option's whole number, or each of a mixture's, at another row length."""
        if isinstance(value, tuple):
            return tuple(dict.fromkeys(self._scaled(name, one, seq_len) for one in value))
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
        if split not in self.splits:
            raise ValueError(f"split={split!r}: {self.name} has {', '.join(self.splits)}")
        if start < 0:
            raise ValueError(f"start={start}: must be ≥ 0")
        if size < 1:
            raise ValueError(f"size={size}: must be ≥ 1")
        if start + size > MAX_ROWS:
            raise ValueError(f"start={start}, size={size}: a split has {MAX_ROWS} rows")
        numbers = torch.arange(start, start + size, device=device)
        return self.rows(split, numbers, seed)

    def rows(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Return the rows with these numbers (int64 [b], ≥ 0) on the device of `numbers`."""
        if not self.varied:
            return self.generate(split, numbers, seed)
        setting = self._setting(split, numbers, seed)
        found = setting.unique().tolist()
        places = [(setting == s).nonzero()[:, 0] for s in found]
        made = [
            self.parts[s].generate(split, numbers[place], seed)
            for s, place in zip(found, places, strict=True)
        ]

        def links() -> dict[str, Tensor]:
            return joined([b.links for b in made], back, _widest(self, split))

        back = torch.cat(places).argsort()
        padding = len(self.role_names) - 1
        inputs, targets, roles = (
            _padded([getattr(b, name) for b in made], self.seq_len, fill)[back]
            for name, fill in (("inputs", 0), ("targets", IGNORE), ("roles", padding))
        )
        return Batch(inputs, targets, roles, Links(links, {"setting": setting[:, None]}))

    def oracle(self, batch: Batch) -> Tensor:
        """Return the right answers, int64 [b t] (-100 unscored), from `batch.inputs` alone.

        Where the inputs cannot settle them, a task's own docstring says which links it reads
        beside: what its facts, automaton or text are. Of a mixture `setting` is read, too.
        """
        return self._by_part(batch, lambda part, rows: part.solve(rows))

    @property
    def chance(self) -> float:
        """The accuracy of a uniform guess over the legal answers, in [0, 1].

        Of a mixture it is the mean over the scored positions of 256 test rows.
        """
        if not self.varied:
            return self.guess
        batch = self.batch(split="test", size=256)
        scored = (batch.targets != IGNORE).sum(1).double()
        guess = torch.tensor([part.guess for part in self.parts]).double()
        return ((guess[batch.links["setting"][:, 0]] * scored).sum() / scored.sum()).item()

    def shortcuts(self) -> dict[str, Predictor]:
        """Return rules that look right without solving the task, by name."""
        if not self.varied:
            return self.rules()

        def by_part(name: str) -> Predictor:
            return lambda batch: self._by_part(batch, lambda part, rows: part.rules()[name](rows))

        return {name: by_part(name) for name in self.parts[-1].rules()}

    def words(self, split: str, numbers: Tensor, seed: int, count: int) -> Tensor:
        """Return `count` random words for each row, int64 [b count]: all that rows are made of."""
        key = counter.stream(self.name, seed)
        return counter.words(key, self.splits.index(split), numbers, count)

    def _setting(self, split: str, numbers: Tensor, seed: int) -> Tensor:
        """Return which part each row is of, int64 [b]."""
        setting = torch.zeros_like(numbers)
        for name, values in self.varied:
            if isinstance(values, Schedule):
                stage = values.stage(numbers) if split == "train" else len(values.values) - 1
            else:
                key = counter.stream(f"{self.name} {name}", seed)
                word = counter.words(key, self.splits.index(split), numbers, 1)
                stage = counter.below(word, len(values))[:, 0]
            setting = setting * len(_values(name, values)) + stage
        return setting

    def _by_part(self, batch: Batch, rule: Callable[["Task", Batch], Tensor]) -> Tensor:
        """Apply a rule to the rows of each part, cut to the part's length."""
        if not self.varied:
            return rule(self, batch)
        setting = batch.links["setting"][:, 0]
        answers = torch.full_like(batch.inputs, IGNORE)
        for s in setting.unique().tolist():
            place, part = (setting == s).nonzero()[:, 0], self.parts[s]
            answers[place, : part.seq_len] = rule(part, batch.taken(place, part.seq_len))
        return answers


@lru_cache(maxsize=64)
def _hints(kind: type[Task]) -> dict[str, Any]:
    """Return a class's annotations, looked up once: a schedule makes a task for every stage."""
    return get_type_hints(kind)


def _values(name: str, values: tuple[Any, ...] | Schedule) -> tuple[Any, ...]:
    if not isinstance(values, Schedule) and not values:
        raise ValueError(f"{name}=(): must name at least one value")
    return values.values if isinstance(values, Schedule) else values


@lru_cache(maxsize=64)
def _widest(task: Task, split: str) -> list[Mapping[str, Tensor]]:
    """Return links of one row of each part: as wide as any batch's, whatever settings it has."""
    one = torch.zeros(1, dtype=torch.int64)
    return [part.generate(split, one, 0).links for part in task.parts]


def _padded(tensors: Sequence[Tensor], seq_len: int, fill: int) -> Tensor:
    """Stack rows [b t] of several lengths, filled to seq_len at the end."""
    pad = torch.nn.functional.pad
    return torch.cat([pad(x, (0, seq_len - x.shape[1]), value=fill) for x in tensors])


__all__ = [
    "IGNORE",
    "MAX_ROWS",
    "Batch",
    "Links",
    "Predictor",
    "Preset",
    "Schedule",
    "Task",
    "accuracy",
]
