"""Convert findings for analysis.json, and identify the data, code and machine behind them."""

import base64
import hashlib
import math
import platform
import subprocess
import zlib
from dataclasses import field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lab import __version__
from lab.training.runs import Run

STORED = "stored"
DATA = "data, SHA-256"


def figure_only() -> Any:
    """Return a dataclass field that only figures need: analysis.json leaves it out."""
    return field(metadata={STORED: False})


def to_plain(value: Any) -> Any:
    """Convert a finding for JSON: dataclasses to dicts, arrays to lists, NaN and ±∞ to None.

    Raises:
        TypeError: for a value of any other type.
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
    raise TypeError(f"{type(value).__name__} is a type that analysis.json cannot hold")


def deflate(data: bytes) -> str:
    """Compress bytes for a page: zlib's deflate as base64, which browsers inflate themselves."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


def collect_provenance(run: Run) -> dict[str, str]:
    """Return what identifies data, code and machine, as text by name."""
    result = run.read_result() or {}
    return {
        "seed": str(run.train.seed),
        "trained on": f"{result.get('device', '–')}, {result.get('precision', '–')}",
        DATA: hash_data(run),
        "lab": __version__,
        "lab commit": find_commit() or "unknown",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "plotly")},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def hash_data(run: Run) -> str:
    """Hash the first test batch's inputs: SHA-256 of little-endian int64, row by row."""
    size = min(run.train.batch_size, run.train.test_rows)
    inputs = run.task.batch(split="test", size=size, seed=run.train.seed).inputs
    return hashlib.sha256(inputs.numpy().astype("<i8").tobytes()).hexdigest()


def find_commit() -> str | None:
    """Return the commit of the lab's sources, ending in "-dirty" if they differ from it.

    None if it is unknown: without git, or for an installation outside a repository.
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
