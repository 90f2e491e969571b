"""Values that no field of a run's files should have, or that are at the edge of what it may."""

import json
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    "",
    "x",
    "\x1b[2J\x07",
    "é\u202e\ud800",
    "a" * 100_000,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    [],
    [1, "2", None],
    [[[]]],
    {},
    {"first": 0, "last": 10**9, "rows": 10},
    {"first": "a", "last": None, "rows": 1.5},
    {"x": {"y": []}},
    "../../etc/passwd",
    "os:system",
)


def list_paths(content: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where every value of a JSON document is, the document itself left out."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        pairs = list(content.items())
    elif isinstance(content, list):
        pairs = list(enumerate(content[:2]))
    return [
        path
        for key, value in pairs
        for path in ((*prefix, key), *list_paths(value, (*prefix, key)))
    ]


def replace_value(text: str, path: tuple[Any, ...], value: Any) -> str:
    """Return a JSON document with another value at a place; ... drops it."""
    content = json.loads(text)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(content)
