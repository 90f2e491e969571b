"""What a module returned, and where in it the sequence is."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from lab.laws.adapters.plain import laid
from lab.laws.refusal import RefusalError


def sequence_in(
    found: Any, layout: str, shape: tuple[int, int], output: int | str | None
) -> int | str | None:
    """Return where the first floats [b t …] are, None if they are all that was returned.

    Args:
        found: what was returned.
        layout: of its axes.
        shape: b and t.
        output: the only place to look in, if not None.

    Raises:
        RefusalError: if there are none.
    """
    seen = []
    for place, value in items(found):
        if isinstance(value, Tensor):
            fits = value.ndim > 1 and laid(value, layout).shape[:2] == shape
            if fits and value.is_floating_point() and output in (None, place):
                return place
            seen.append(f"{named(place)} {list(value.shape)}" if place is not None else "")
            seen[-1] = seen[-1] or f"{list(value.shape)} {value.dtype}".replace("torch.", "")
        elif output == place and output is not None:
            seen.append(f"{named(place)} {type(value).__name__}")
    raise RefusalError(f"returned no floats [b t …]: {', '.join(seen) or type(found).__name__}")


def items(found: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the places in what was returned, and what is there; None: all of it, a tensor."""
    if isinstance(found, Tensor):
        yield None, found
    elif isinstance(found, Mapping):
        yield from found.items()
    elif isinstance(found, tuple | list):
        yield from enumerate(found)
    elif is_dataclass(found):
        yield from ((field.name, getattr(found, field.name)) for field in fields(found))
    else:
        yield from getattr(found, "__dict__", {}).items()


def named(place: Any) -> str:
    """Return the words for a place."""
    return f"item {place}" if isinstance(place, int) else f"its {place}"


def kind_of(found: Any) -> str:
    """Return the words for what was returned."""
    name = type(found).__name__
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"
