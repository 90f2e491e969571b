"""Run all analyses that apply to one subject, and make the content of analysis.json."""

import hashlib
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from analysis import ANALYSES, READ_VECTORS
from analysis.base import NotApplicableError, Subject, check_tokens
from analysis.plain import to_plain
from lab import __version__
from lab.machine import give_back_freed_memory
from lab.training.run import Run
from tasks.near_names import suggest

FORMAT = 1
"""Version of the format of analysis.json."""
DATA = "data, SHA-256"
"""Name of the digest of the data in the provenance."""


@dataclass(frozen=True)
class Examination:
    """All analyses that apply to one subject.

    Attributes:
        results: the findings of each analysis that applies, by name, in the order of `ANALYSES`.
        not_applicable: by name, why the others do not apply.
        seconds: the time that each took, including those that do not apply.
    """

    subject: Subject
    results: dict[str, Sequence[Any]]
    not_applicable: dict[str, str]
    seconds: dict[str, float]


def select_analyses(only: Sequence[str] | None) -> list[str]:
    """Return the names of the requested analyses in the order of `ANALYSES`; None requests all.

    Raises:
        ValueError: for an unknown name, with the near or the known ones.
    """
    for name in only or ():
        if name not in ANALYSES:
            raise ValueError(f"only={name}: is not an analysis. {suggest(name, ANALYSES)}")
    return [name for name in ANALYSES if not only or name in only]


def examine(
    subject: Subject,
    only: Sequence[str] | None = None,
    on_begin: Callable[[str], None] = lambda name: None,
    *,
    lenient: bool = False,
) -> Examination:
    """Run the analyses that apply to a subject.

    Args:
        only: names of analyses; None: all that apply.
        lenient: accept that an analysis named in `only` does not apply.

    Raises:
        ValueError: for an unknown name.
        NotApplicableError: when one named in `only` does not apply, unless lenient.
        RunError: when weights or records of the run cannot be read.
    """
    results: dict[str, Sequence[Any]] = {}
    not_applicable, seconds = {}, {}
    for name in select_analyses(only):
        on_begin(name)
        began = time.perf_counter()
        try:
            if name not in READ_VECTORS:
                check_tokens(subject)
            results[name] = ANALYSES[name].measure(subject)
        except NotApplicableError as error:
            if only and not lenient:
                raise NotApplicableError(f"{name}: {error}") from error
            not_applicable[name] = str(error)
        # Otherwise memory that one analysis freed would add to what the next one takes.
        give_back_freed_memory()
        seconds[name] = time.perf_counter() - began
    return Examination(subject, results, not_applicable, seconds)


def record(examination: Examination) -> dict[str, Any]:
    """Return the content of analysis.json: the numbers of each finding, with title and sentence."""
    subject = examination.subject
    rows, seq_len = subject.batch.roles.shape
    return {
        "format": FORMAT,
        "name": subject.name,
        "step": subject.step,
        "seed": subject.seed,
        "rows": rows,
        "seq_len": seq_len,
        "provenance": None if subject.run is None else collect_provenance(subject.run),
        "seconds": {name: round(value, 3) for name, value in examination.seconds.items()},
        "not_applicable": examination.not_applicable,
        "analyses": {
            name: [{"title": r.title, "says": r.says, **to_plain(r)} for r in results]
            for name, results in examination.results.items()
        },
    }


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
    """Hash the first test batch's inputs, row by row: SHA-256 of little-endian int64 or float32."""
    size = min(run.train.batch_size, run.train.test_rows)
    inputs = run.task.batch(split="test", size=size, seed=run.train.seed).inputs
    kind = "<f4" if run.task.vectors else "<i8"
    return hashlib.sha256(inputs.numpy().astype(kind).tobytes()).hexdigest()


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
