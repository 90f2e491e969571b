"""The folder of a cell: its settings, its run, and how far it got.

cell.json       factors, task, options, lengths
spent.json      minutes it has taken, and the error that ended it, if there is one
log.txt         what its process printed
run/            the run folder
lengths.json    accuracy at each row length
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from lab.files import RunError, explain_write_errors
from lab.folder import read_json, write_json
from lab.sweeps.sweep import Cell
from lab.training.endings import find_ending
from lab.training.runs import Run

Status = Literal["solved", "budget", "diverged", "out of time", "unfinished", "failed", "not run"]
"""How far a cell got. "budget": it took all its steps and is not solved. "out of time": it used its
minutes up. "unfinished": it was interrupted, and goes on when the sweep is run again."""
ENDED = ("solved", "budget", "diverged")
LAST_BYTES = 4_096
"""Bytes that are read from the end of a file of metrics to find its last row."""


@dataclass(frozen=True)
class CellFolder:
    """A cell on disk, or about to be."""

    path: Path

    @property
    def run_path(self) -> Path:
        """The run folder."""
        return self.path / "run"

    @property
    def log(self) -> Path:
        """The file with the output of its process."""
        return self.path / "log.txt"

    def check(self, cell: Cell) -> None:
        """Check that the folder is this cell's, or new.

        Raises:
            RunError: when it holds another cell, or none that can be read, or is in a run's folder.
        """
        if (self.path.parent / "config.json").exists():
            raise RunError(f"out={self.path.parent}: holds a single run; choose another --out")
        if not (self.path / "cell.json").exists():
            return
        held, given = self.read_cell().to_dict(), json.loads(json.dumps(cell.to_dict()))
        # The options are the bulk of it; which of them differs is what a user wants to know.
        theirs, ours = (
            {"task": c["task"], "lengths": c["lengths"], **c["options"]} for c in (held, given)
        )
        differs = [
            f"{name}={theirs.get(name)!r} there and {ours.get(name)!r} here"
            for name in {**theirs, **ours}
            if theirs.get(name) != ours.get(name)
        ]
        if differs:
            raise RunError(
                f"{self.path.parent}: holds runs with {', '.join(differs)}; choose another --out"
            )

    def claim(self, cell: Cell) -> None:
        """Make the folder this cell's, or check that it already is.

        Raises:
            RunError: when it holds another cell, or cannot be written.
        """
        self.check(cell)
        if not (self.path / "cell.json").exists():
            with explain_write_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                write_json(self.path / "cell.json", cell.to_dict())

    def read_cell(self) -> Cell:
        """Return the cell.

        Raises:
            RunError: when there is none.
        """
        held = read_json(self.path / "cell.json", f"{self.path} is not the folder of a cell")
        try:
            return Cell(held["factors"], held["task"], held["options"], tuple(held["lengths"]))
        except (KeyError, TypeError) as error:
            raise RunError(f"{self.path}/cell.json does not describe a cell: {error}") from error

    def open_run(self) -> Run | None:
        """Return the run; None while there is none that can be read."""
        with contextlib.suppress(RunError):
            return Run.open(self.run_path)
        return None

    def read_last_step(self) -> dict[str, Any]:
        """Return the newest row of the run's metrics, from the end of its file; empty before."""
        file = self.run_path / "metrics.jsonl"
        try:
            with open(file, "rb") as opened:
                opened.seek(max(0, file.stat().st_size - LAST_BYTES))
                lines = opened.read().decode(errors="replace").split("\n")
        except OSError:
            return {}
        for line in reversed(lines[:-1]):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    return row
        return {}

    def read_minutes(self) -> float:
        """Return the minutes that the cell has taken."""
        return float(self._read_progress().get("minutes", 0.0))

    def read_error(self) -> str | None:
        """Return the error that ended it, or None."""
        return self._read_progress().get("error")

    def note(self, minutes: float, error: str | None) -> None:
        """Add minutes, and record the error of the cell's process, or None.

        Raises:
            RunError: when it cannot be written.
        """
        with explain_write_errors(self.path):
            write_json(
                self.path / "spent.json", {"minutes": self.read_minutes() + minutes, "error": error}
            )

    def read_lengths(self) -> list[dict[str, Any]]:
        """Return the evaluations by row length: seq_len, step, test and validation accuracy."""
        file = self.path / "lengths.json"
        if not file.exists():
            return []
        return read_json(file, f"{file}: cannot be read; remove it")["lengths"]

    def write_lengths(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Write the evaluations by row length.

        Raises:
            RunError: when it cannot be written.
        """
        with explain_write_errors(self.path):
            write_json(self.path / "lengths.json", {"lengths": list(found)})

    def find_status(self) -> Status:
        """Return how far the cell got."""
        if not (self.path / "cell.json").exists():
            return "not run"
        run = self.open_run()
        result = None
        if run is not None:
            with contextlib.suppress(RunError):
                result = run.read_result()
        ending = find_ending(result)
        if ending in ENDED:
            return cast(Status, ending)
        if self.read_error() is not None:
            return "failed"
        return "out of time" if ending == "out of time" else "unfinished"

    def _read_progress(self) -> dict[str, Any]:
        file = self.path / "spent.json"
        return read_json(file, f"{file}: cannot be read; remove it") if file.exists() else {}
