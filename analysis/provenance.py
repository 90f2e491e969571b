"""Where a report comes from: data, seed, versions, commit."""

import hashlib
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from lab.training.runs import Run


def provenance(run: Run) -> dict[str, str]:
    """Return what identifies data, code and machine, by name, as text."""
    result = run.result() or {}
    return {
        "seed": str(run.train.seed),
        "trained on": f"{result.get('device', '–')}, {result.get('precision', '–')}",
        "data, SHA-256": data_hash(run),
        "lab commit": commit() or "unknown",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "plotly")},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def data_hash(run: Run) -> str:
    """Return the SHA-256 of the first test batch's inputs, int64 little-endian, row by row."""
    size = min(run.train.batch_size, run.train.test_rows)
    inputs = run.task.batch(split="test", size=size, seed=run.train.seed).inputs
    return hashlib.sha256(inputs.numpy().astype("<i8").tobytes()).hexdigest()


def commit() -> str | None:
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
