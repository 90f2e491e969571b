"""What identifies the data, code and machine behind an analysis."""

import hashlib
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from lab import __version__
from lab.training.run import Run

DATA = "data, SHA-256"


def collect_provenance(run: Run) -> dict[str, str]:
    """Return what identifies data, code and machine, as text by name."""
    result, change = run.read_result() or {}, run.describe_change()
    return {
        "seed": str(run.train.seed),
        "trained on": f"{result.get('device', '–')}, {result.get('precision', '–')}",
        **({"mixer": change} if change else {}),
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
