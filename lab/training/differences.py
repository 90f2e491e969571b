"""What differs between two configurations, and from the defaults."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any


def get_defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the default of each field of a dataclass that has one."""
    made = {f.name: f.default_factory() for f in fields(kind) if f.default_factory is not MISSING}
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING} | made


def list_differences(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Yield each field that differs between two configurations, with its two values."""
    for part in ("task", "model", "train"):
        for name in {**theirs[part], **ours[part]}:
            was, now = theirs[part].get(name), ours[part].get(name)
            if was != now:
                yield f"{part}.{name}", was, now
