"""Read the text of an option: one value, several values, or a schedule."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from tasks.near_names import suggest

if TYPE_CHECKING:
    from tasks.schedule import Schedule


TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True)
class Span:
    """A schedule as typed: from one value to another over some steps (None: all)."""

    first: int | float
    last: int | float
    steps: int | None

    def schedule(self, max_steps: int, batch_size: int) -> "Schedule":
        """Return the schedule over the rows of these steps."""
        from tasks.schedule import Schedule

        return Schedule(self.first, self.last, (self.steps or max_steps) * batch_size)


def find_kind(hint: Any) -> Any:
    """Return the type of a single value of an annotation: int, float, str, bool, or a Literal."""
    if get_origin(hint) in (Union, UnionType):
        members = [member for member in get_args(hint) if member is not NoneType]
        return float if set(members) == {int, float} else members[0]
    return hint


def varies(hint: Any) -> bool:
    """Whether an option takes several values: numbers and named choices do, other text does not."""
    return find_kind(hint) in (int, float) or get_origin(find_kind(hint)) is Literal


def read(name: str, text: str, hint: Any) -> Any:
    """Read a value, "4,16,64" (a mixture), "4:64" or "4:64@500" (a schedule over 500 steps).

    Raises:
        ValueError: naming the option, the text, and what it may be.
    """
    kind = find_kind(hint)
    if kind is bool:
        if text not in TRUTHS:
            raise ValueError(f"{name}={text}: must be true or false")
        return TRUTHS[text]
    if not varies(hint):
        return text
    if get_origin(kind) is Literal:
        return tuple(text.split(",")) if "," in text else text
    number, what, several = (
        (int, "a whole number", "4,16,64") if kind is int else (float, "a number", "0.1,0.5,0.9")
    )
    span, at, steps = text.partition("@")
    try:
        if ":" in span:
            first, last = map(number, span.split(":"))
            return Span(first, last, int(steps) if at else None)
        if at:
            raise ValueError
        return tuple(map(number, text.split(","))) if "," in text else number(text)
    except ValueError:
        raise ValueError(
            f"{name}={text}: must be {what}, several ({several}), or a schedule (4:64, 4:64@500 "
            "for 500 steps)"
        ) from None


def read_settings(texts: list[str], task: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Read ["seq_len=512,1024", …]: values to evaluate at, by option of the task.

    Raises:
        ValueError: for text of another form, an unknown option, or a value that cannot be read.
    """
    hints = get_type_hints(task)
    known = [f.name for f in fields(task) if f.init]
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values:
            raise ValueError(f"eval={text}: must look like seq_len=512,1024")
        if name not in known:
            raise ValueError(
                f"eval={text}: {name} is not an option of {task.name}. {suggest(name, known)}"
            )
        value = read(name, values, hints[name])
        if isinstance(value, Span):
            raise ValueError(f"eval={text}: must be values, not a schedule")
        found[name] = found.get(name, ()) + (value if isinstance(value, tuple) else (value,))
    return found


def keep_ends(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each span by a mixture of its two ends, on which alone a task's sizes depend."""
    return {
        name: (value.first, value.last) if isinstance(value, Span) else value
        for name, value in options.items()
    }


def resolve_spans(options: Mapping[str, Any], max_steps: int, batch_size: int) -> dict[str, Any]:
    """Replace each span by a schedule.

    Raises:
        ValueError: for a span of no steps, or of more steps than training has.
    """
    found = {}
    for name, value in options.items():
        if isinstance(value, Span):
            if value.steps is not None and not 1 <= value.steps <= max_steps:
                raise ValueError(
                    f"{name}={value.first}:{value.last}@{value.steps}: steps must be in "
                    f"1 … {max_steps} (max_steps)"
                )
            value = value.schedule(max_steps, batch_size)
        found[name] = value
    return found
