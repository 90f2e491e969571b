"""What a stranger's file would import and read, which the user has to allow.

A run's config.json may name a class to import and a text to read. Whoever unpacks a stranger's run
did not choose them, so only what the user's own command names is used, or what --trust allows.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def list_named(config: Mapping[str, Any]) -> list[str]:
    """Return what the content of a config.json has imported and read, in words."""
    model, task = (config.get(part) for part in ("model", "task"))
    code = model.get("model") if isinstance(model, Mapping) else None
    text = task.get("path") if isinstance(task, Mapping) else None
    found = [] if code is None else [f"import and run {code}"]
    return found if text is None else [*found, f"read the text {text}"]


def ask_for_trust(what: object, named: Sequence[str], how: str = "--trust") -> str:
    """Say in one line what a run or a file would do, and how to allow it."""
    return f"{what}: would {' and '.join(named)}, which you have not named; {how} allows that"
