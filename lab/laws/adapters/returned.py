"""Finding the sequence in what a module returned."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from lab.laws.adapters.plain import lay_out
from lab.laws.refusal import RefusalError


def find_sequence(
    found: Any, layout: str, shape: tuple[int, int], output: int | str | None
) -> int | str | None:
    """Return the place of the first float tensor [b t …]; None if the tensor is not in a container.

    Args:
        found: what the module returned.
        layout: order of its axes.
        shape: b and t.
        output: the only place to look at, if not None.

    Raises:
        RefusalError: if there is no such tensor.
    """
    seen = []
    for place, value in list_items(found):
        if isinstance(value, Tensor):
            fits = value.ndim > 1 and lay_out(value, layout).shape[:2] == shape
            if fits and value.is_floating_point() and output in (None, place):
                return place
            seen.append(f"{name_place(place)} {list(value.shape)}" if place is not None else "")
            seen[-1] = seen[-1] or f"{list(value.shape)} {value.dtype}".replace("torch.", "")
        elif output == place and output is not None:
            seen.append(f"{name_place(place)} {type(value).__name__}")
    wanted = "no floats [b t …]" if output is None else f"no floats [b t …] as output {output}"
    raise RefusalError(f"returned {wanted}, only {', '.join(seen) or type(found).__name__}")


def list_items(found: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in what was returned and its content; the place of a bare tensor is None."""
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


def name_place(place: Any) -> str:
    """Name a place in words."""
    return f"item {place}" if isinstance(place, int) else f"field {place}"


def name_kind(found: Any) -> str:
    """Name the type of what was returned, with its article."""
    name = type(found).__name__
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"
