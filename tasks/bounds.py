"""Options: fields with a help text, and checks whose errors name field, value and bound."""

from collections.abc import Collection
from dataclasses import field
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tasks.near_names import list_choices

KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
MAX_SEQ_LEN = 2**20
MAX_VOCAB_SIZE = 2**30


def option(default: Any, help: str, shown: str | None = None, **display: Any) -> Any:
    """Return a dataclass field with its help text and how the command line shows its default.

    Args:
        default: the default; `dataclasses.MISSING` for a field that must be given.
        help: of the option, in a line or two.
        shown: the default in words, where that says more than its value.
        display: what else `lab.cli.command.annotate` knows: flag, metavar, panel, argument, read.
    """
    return field(default=default, metadata={"help": help, "shown": shown, **display})


def find_kind(hint: Any) -> Any:
    """Return the type of a single value of an annotation: int, float, str, bool, or a Literal."""
    if get_origin(hint) in (Union, UnionType):
        members = [member for member in get_args(hint) if member is not NoneType]
        return float if set(members) == {int, float} else members[0]
    return hint


def varies(hint: Any) -> bool:
    """Whether an option takes several values: numbers and named choices do, other text does not."""
    return find_kind(hint) in (int, float) or get_origin(find_kind(hint)) is Literal


def check_range(
    name: str, value: int | float, low: int | float, high: int | float, why: str = ""
) -> None:
    """Check that a number is in low … high, both included.

    Raises:
        ValueError: if it is outside, or not a number.
    """
    if not low <= value <= high:
        reason = f" ({why})" if why else ""
        raise ValueError(f"{name}={value}: must be in {low} … {high}{reason}")


def check_choice(name: str, value: Any, known: Collection[Any]) -> None:
    """Check that a value is one of the known ones.

    Raises:
        ValueError: if it is none of them; lists them, and asks whether a near one was meant.
    """
    if value not in known:
        choices = list_choices(str(value), map(str, known))
        raise ValueError(f"{name}={value!r}: {choices}")


def check_kind(name: str, value: Any, hint: Any) -> None:
    """Check a value against its annotation: int, float, bool or str, and None where allowed.

    Raises:
        ValueError: if it is of another type; a bool is not a number.
    """
    allowed = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    if value is None and NoneType in allowed:
        return
    for kind, what in KINDS.items():
        if kind in allowed:
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{name}={value!r}: must be {what}")
            return


class TextChangedError(ValueError):
    """A text is no longer what it was when its rows began to be read."""
