"""analysis.json: what was measured and on what, as numbers that another program can read."""

import hashlib
import math
import platform
import subprocess
from dataclasses import field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lab.training.runs import Run

STORED = "stored"


def figure_only() -> Any:
    """Return a dataclass field for what only a figure needs: analysis.json leaves it out."""
    return field(metadata={STORED: False})


def to_plain(value: Any) -> Any:
    """Return a result as JSON takes it: dataclasses by field, arrays as lists, NaN and ±∞ as None.

    Raises:
        TypeError: for a value that is none of these.
    """
    if is_dataclass(value) and not isinstance(value, type):
        kept = [f.name for f in fields(value) if f.metadata.get(STORED, True)]
        return {name: to_plain(getattr(value, name)) for name in kept}
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is nothing that analysis.json can hold")


def collect_provenance(run: Run) -> dict[str, str]:
    """Return what identifies data, code and machine, by name, as text."""
    result = run.read_result() or {}
    return {
        "seed": str(run.train.seed),
        "trained on": f"{result.get('device', '–')}, {result.get('precision', '–')}",
        "data, SHA-256": hash_data(run),
        "lab commit": find_commit() or "unknown",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "plotly")},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def hash_data(run: Run) -> str:
    """Return the SHA-256 of the first test batch's inputs, int64 little-endian, row by row."""
    size = min(run.train.batch_size, run.train.test_rows)
    inputs = run.task.batch(split="test", size=size, seed=run.train.seed).inputs
    return hashlib.sha256(inputs.numpy().astype("<i8").tobytes()).hexdigest()


def find_commit() -> str | None:
    """Return the commit of the lab's own sources, "-dirty" when they differ from it.

    None where it cannot be known: no git, or an installation outside a repository of its own.
    """
    here = Path(__file__)
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
