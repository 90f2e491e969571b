"""Any value in any field of a run's JSON files ends in a result or in one line, never in more."""

import json
from pathlib import Path
from typing import Any

from tests.faults.attempt import attempt, report, run_command
from tests.faults.numbered import draw_cases
from tests.faults.planted import copy

FILES = {
    "config.json": ("runs", "analyze", "resume"),
    "result.json": ("runs", "analyze", "resume"),
    "state.json": ("analyze", "resume"),
    "metrics.jsonl": ("runs", "analyze", "resume"),
    "analysis.json": ("analyze", "resume"),
    "report.json": ("analyze", "resume"),
}
"""Which commands read each file."""
WORDS = {
    "runs": ("{root}",),
    "analyze": ("{run}", "--only", "tokens", "--rows", "4"),
    "resume": ("{run}", "--max-steps", "8", "--threads", "1"),
}
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
"""Values that no field should have, or that are at the edge of what it may."""


def test_odd_values_in_any_field(tmp_path):
    failed, tried = [], 0
    for number, random in draw_cases(default=5):
        run = copy(tmp_path / str(number))
        name = random.choice(list(FILES))
        (file,) = run.rglob(name)
        said = _damage(file, random)
        command = random.choice(FILES[name])
        words = [word.format(root=run.parent, run=run) for word in WORDS[command]]
        outcome = attempt(run_command(command, *words))
        tried += 1
        if outcome.fault:
            failed.append(f"case {number}: lab {command}, {name} {said}: {outcome.fault}")
    report("odd JSON fields", tried, failed)


def _damage(file: Path, random) -> str:
    """Put an odd value into a field of a file; return what was done."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    place = random.randrange(len(lines))
    path = random.choice(list_paths(json.loads(lines[place])))
    value = random.choice((*ODD, ...))
    lines[place] = replace_value(lines[place], path, value)
    file.write_text("\n".join(lines) + "\n")
    return f"{'.'.join(map(str, path))}={str(value)[:40]!r}"


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
