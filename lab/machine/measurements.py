"""Measurements of this machine, kept as JSON files in the user's cache folder."""

import json
from pathlib import Path
from typing import Any

import platformdirs

from lab.folder import write


def find_file(name: str) -> Path:
    """Return the file of the measurements of one kind."""
    return Path(platformdirs.user_cache_dir("wonderful-lab")) / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """Return the kept measurements of a kind by key; none if the file cannot be read."""
    try:
        known = json.loads(find_file(name).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def remember(name: str, key: str, value: Any) -> None:
    """Keep a measurement. Where nothing can be written, the next run measures again."""
    file = find_file(name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, json.dumps(read(name) | {key: value}, indent=1))
    except OSError:
        pass
