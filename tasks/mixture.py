"""A mixture: rows of several tasks of one kind, which differ in the options that vary."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar, get_origin, get_type_hints

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Task
from tasks.lazy import Tensor, torch
from tasks.schedule import Schedule

MAX_SETTINGS = 4096
"""Settings that the varied options of a task may make together."""
CHANCE_ROWS = 256
"""Test rows that the chance level of a mixture is averaged over."""

Values = tuple[Any, ...] | Schedule
"""Of an option that varies: one of several at random for each row, or a schedule."""


@dataclass(frozen=True, kw_only=True)
class Mixture(Task):
    """Rows of several tasks of one kind: one task, a part, for each setting of varied options.

    A row's number decides which part it is of. The row is padded to the longest part's length, with
    input 0, the last of `role_names` and no target; `links["setting"]` [b 1] is the part's index.

    Class attributes (`name`, `splits`, …) are those of the kind; seq_len and vocab_size are the
    largest of any part.

    Args:
        kind: class of the parts.
        given: options by name, as (name, value) pairs; an option varies if its value is a tuple,
            from which each row takes one at random, or a `Schedule`.

    Attributes:
        parts: a task for each setting; the last varied option changes fastest.

    Raises:
        ValueError: for an option without a value, too many settings, or options that a part
            refuses.
    """

    kind: type[Task]
    given: tuple[tuple[str, Any], ...]
    seq_len: int = field(init=False)
    vocab_size: int = field(init=False)
    parts: tuple[Task, ...] = field(init=False, repr=False, compare=False)

    def __new__(cls, **_: Any) -> "Mixture":
        """Return a mixture: it has no options that could vary in turn."""
        return object.__new__(cls)

    def validate(self) -> None:
        """Build the parts, and set the fields and class attributes that follow from them."""
        options = dict(self.given)
        varied = select_varied(self.kind, options)
        # Counted before they are listed: a schedule may have more values than memory holds.
        count = math.prod(_count_values(name, values) for name, values in varied.items())
        if count > MAX_SETTINGS:
            names = ", ".join(varied)
            raise ValueError(f"{names}: make {count} settings together, must be ≤ {MAX_SETTINGS}")
        each = [_list_values(values) for values in varied.values()]
        parts = tuple(
            self.kind(**{**options, **dict(zip(varied, setting, strict=True))})
            for setting in product(*each)
        )
        widths = sorted({tuple(part.sizes.values()) for part in parts})
        if self.kind.vectors and len(widths) > 1:
            found = ", ".join(str(width) for width, _ in widths)
            raise ValueError(
                f"{', '.join(varied)}: rows have vectors of {found} numbers, must be one width"
            )
        # A part may fill an option in, as a text's digest; one that they fill differently is open.
        filled = {
            name: value if all(getattr(part, name) == value for part in parts) else None
            for name, value in parts[-1].options.items()
        }
        following = {
            **{name: getattr(self.kind, name) for name in _CLASS_ATTRIBUTES},
            "given": tuple({**filled, **varied}.items()),
            "seq_len": max(part.seq_len for part in parts),
            "vocab_size": max(part.vocab_size for part in parts),
            "parts": parts,
        }
        for name, value in following.items():
            object.__setattr__(self, name, value)

    @property
    def varied(self) -> dict[str, Values]:
        """The options that vary, with their values."""
        return select_varied(self.kind, self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the kind by name, varied ones as given."""
        return dict(self.given)

    def replace(self, **options: Any) -> Task:
        """Return the mixture with other values of some options; a plain task if none varies now."""
        return self.parts[-1].replace(**{**self.varied, **options})

    def resize(self, seq_len: int) -> Task:
        """Return the mixture in rows of another length, each value of an option scaled."""
        for name, values in self.varied.items():
            if self.grows and (name == "seq_len" or isinstance(values, Schedule)):
                raise ValueError(f"seq_len={seq_len}: {name} already varies over the rows")
        return super().resize(seq_len)

    def _scale(self, name: str, value: Any, seq_len: int) -> Any:
        scale = self.parts[-1]._scale
        if not isinstance(value, tuple):
            return scale(name, value, seq_len)
        return tuple(dict.fromkeys(scale(name, one, seq_len) for one in value))

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b], ≥ 0) on the device of `numbers`."""
        setting = self._choose_settings(split, numbers, seed)
        found = setting.unique().tolist()
        places = [(setting == s).nonzero()[:, 0] for s in found]
        batches = [
            self.parts[s].generate(split, numbers[place], seed)
            for s, place in zip(found, places, strict=True)
        ]
        order = torch.cat(places).argsort()

        def make_links() -> dict[str, Tensor]:
            return _join_links([b.links for b in batches], order, _list_links(self, split))

        padding = len(self.role_names) - 1
        inputs, targets, roles = (
            _pad_rows([getattr(b, name) for b in batches], self.seq_len, fill)[order]
            for name, fill in (
                ("inputs", 0),
                ("targets", math.nan if self.vectors else IGNORE),
                ("roles", padding),
            )
        )
        links = Links(make_links, {"setting": setting[:, None]})
        return Batch(inputs, targets, roles, links, batches[0].several)

    def _choose_settings(self, split: str, numbers: Tensor, seed: int) -> Tensor:
        """Return the index of each row's part, int64 [b]."""
        setting = torch.zeros_like(numbers)
        for name, values in self.varied.items():
            count = _count_values(name, values)
            if isinstance(values, Schedule):
                which = values.find_stage(numbers) if split == "train" else count - 1
            else:
                key = counter.derive_key(f"{self.name} {name}", seed)
                word = counter.draw_words(key, self.splits.index(split), numbers, 1)
                which = counter.draw_below(word, count)[:, 0]
            setting = setting * count + which
        return setting

    def oracle(self, batch: Batch) -> Tensor:
        """Return the right answers of each row's part; `links["setting"]` is read, too."""
        return self._predict(batch, lambda part: part.oracle)

    @property
    def sizes(self) -> dict[str, Any]:
        """The largest of each size of any part."""
        names = self.parts[-1].sizes
        return {name: max(part.sizes[name] for part in self.parts) for name in names}

    @property
    def chance(self) -> float:
        """The parts' chance levels, averaged over the scored positions of 256 test rows."""
        batch = self.batch(split="test", size=CHANCE_ROWS)
        scored = batch.scored.sum(1).double()
        chance = torch.tensor([part.chance for part in self.parts]).double()
        return ((chance[batch.links["setting"][:, 0]] * scored).sum() / scored.sum()).item()

    def shortcuts(self) -> dict[str, Predictor]:
        """Return the shortcuts of the kind, by name; each applies that of a row's part."""

        def apply(name: str) -> Predictor:
            return lambda batch: self._predict(batch, lambda part: part.shortcuts()[name])

        return {name: apply(name) for name in self.parts[-1].shortcuts()}

    def _predict(self, batch: Batch, choose: Callable[[Task], Predictor]) -> Tensor:
        """Apply the predictor chosen for each part to the part's rows, cut to its length."""
        setting = batch.links["setting"][:, 0]
        answers = torch.full_like(batch.targets, math.nan if self.vectors else IGNORE)
        for s in setting.unique().tolist():
            place, part = (setting == s).nonzero()[:, 0], self.parts[s]
            found = choose(part)(batch.take(place, part.seq_len))
            answers[place, : part.seq_len] = found.to(answers)
        return answers

    def format_token(self, token: int) -> str:
        """Return how the last part shows a token; `list_tasks` says which part a row is of."""
        return self.parts[-1].format_token(token)

    def list_tasks(self, batch: Batch) -> list[Task]:
        """Return the part that each row of a batch is of."""
        return [self.parts[setting] for setting in batch.links["setting"][:, 0].tolist()]


_CLASS_ATTRIBUTES = [n for n, hint in get_type_hints(Task).items() if get_origin(hint) is ClassVar]


def select_varied(kind: type, options: Mapping[str, Any]) -> dict[str, Values]:
    """Return the options of a task that vary over its rows, in the order of its fields."""
    return {
        f.name: tuple(value) if isinstance(value, list) else value
        for f in fields(kind)
        if isinstance(value := options.get(f.name), (tuple, list, Schedule))
    }


def _count_values(name: str, values: Values) -> int:
    if isinstance(values, Schedule):
        return values.stages
    if not values:
        raise ValueError(f"{name}=(): must name at least one value")
    return len(values)


def _list_values(values: Values) -> tuple[Any, ...]:
    return values.values if isinstance(values, Schedule) else values


@lru_cache(maxsize=64)
def _list_links(task: Mixture, split: str) -> list[Mapping[str, Tensor]]:
    """Return the links of one row of each part: they say how wide a batch's may become."""
    one = torch.zeros(1, dtype=torch.int64)
    return [part.generate(split, one, 0).links for part in task.parts]


def _join_links(
    links: Sequence[Mapping[str, Tensor]], order: Tensor, like: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Join the links of several batches, padded with -1 to the widest.

    Args:
        links: of each batch, all of the same names.
        order: the rows, laid end to end, are returned in this order.
        like: links whose widths count too, so that all batches have the same.
    """
    joined = {}
    for name in links[0]:
        shapes = zip(*(found[name].shape[1:] for found in [*links, *like]), strict=True)
        widest = [max(sizes) for sizes in shapes]
        joined[name] = torch.cat([_pad_link(found[name], widest) for found in links])[order]
    return joined


def _pad_link(link: Tensor, sizes: list[int]) -> Tensor:
    """Pad every axis but the rows' with -1 at its end."""
    missing = [size - now for size, now in zip(sizes, link.shape[1:], strict=True)]
    return torch.nn.functional.pad(
        link, [n for end in reversed(missing) for n in (0, end)], value=-1
    )


def _pad_rows(tensors: Sequence[Tensor], seq_len: int, fill: int | float) -> Tensor:
    """Stack rows [b t], or [b t i] of vectors, of several lengths, filled to seq_len at the end."""
    pad = torch.nn.functional.pad
    return torch.cat(
        [pad(x, (0, 0) * (x.ndim - 2) + (0, seq_len - x.shape[1]), value=fill) for x in tensors]
    )
