"""The metrics of a run, one row a step: read once, then asked for stages and evaluations."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from lab.files import RunError
from lab.folder import Folder
from lab.machine.memory import measure_free_memory
from lab.training.schema import RowLine, is_valid

CHECKSUM, CHECKPOINT = "crc32", "checkpoint"
PARSED = 12
"""Bytes that a byte of the file takes when it is read, about."""
MetricsRow = dict[str, Any]
"""A `lab.training.row.Row` without its empty fields; rows of older runs have fewer fields."""


@dataclass(frozen=True)
class TrainedStage:
    """Training at one row length, as far as it went.

    Attributes:
        seq_len: tokens of a row.
        began: steps taken before the stage.
        steps: steps taken in it.
        seconds: time that they took.
        accuracy: the newest validation accuracy in it; None without an evaluation.
    """

    seq_len: int
    began: int
    steps: int
    seconds: float
    accuracy: float | None


@dataclass(frozen=True)
class Metrics(Sequence[MetricsRow]):
    """The rows of metrics.jsonl at the time of reading, oldest first.

    A run that is still training grows its file, so read it again to see later rows.

    Attributes:
        rows: a row a step.
        checkpoint: step of the newest checkpoint when the last row was written; 0 if none.
        seq_len: row length of the task, for rows from before lengthening, which do not tell theirs.
    """

    rows: tuple[MetricsRow, ...]
    checkpoint: int = 0
    seq_len: int = 0

    @classmethod
    def read(cls, file: Path, seq_len: int) -> "Metrics":
        """Read a file; none is an empty one. Last lines that are no rows are left out.

        A run killed while it wrote leaves such a line; its step will be taken again. Lines of older
        versions of the lab have no checksum.

        Raises:
            RunError: when the file cannot be read, a line was changed, or one is missing.
        """
        folder = Folder(file.parent)
        try:
            data = folder.read(file.name, measure_free_memory() // PARSED)
        except FileNotFoundError:
            return cls((), seq_len=seq_len)
        except (OSError, RunError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise RunError(f"{file}: cannot be read: {why}") from error
        return cls(*_parse(file, data.decode(errors="replace").splitlines()), seq_len=seq_len)

    @overload
    def __getitem__(self, index: int) -> MetricsRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MetricsRow]: ...
    def __getitem__(self, index: int | slice) -> MetricsRow | Sequence[MetricsRow]:
        """Return a row, or some rows."""
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last_test(self) -> MetricsRow:
        """The newest row with a test of the model; empty if there is none."""
        return next((row for row in reversed(self.rows) if "test_accuracy" in row), {})

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations on held-out rows, oldest first: step, seq_len, split, loss, accuracy.

        They are on validation rows of the length trained at; in runs from before there was a
        validation split, on test rows.
        """
        found = []
        for row in self.rows:
            split = "validation" if "validation_accuracy" in row else "test"
            loss, accuracy = (row.get(f"{split}_{name}") for name in ("loss", "accuracy"))
            if loss is not None and accuracy is not None:
                where = {"step": row["step"], "seq_len": self._find_length(row), "split": split}
                found.append({**where, "loss": loss, "accuracy": accuracy})
        return found

    @property
    def stages(self) -> list[TrainedStage]:
        """The stages of training, shortest rows first."""
        stages: list[list[MetricsRow]] = []
        for row in self.rows:
            if not stages or self._find_length(stages[-1][-1]) != self._find_length(row):
                stages.append([])
            stages[-1].append(row)
        return [self._summarize(stage) for stage in stages]

    @property
    def cpu_seconds(self) -> float | None:
        """Processor time of all steps; None if a version that did not measure it took some."""
        spent = [row["cpu_seconds"] for row in self.rows if "cpu_seconds" in row]
        return sum(spent) if len(spent) == len(self.rows) else None

    def _find_length(self, row: MetricsRow) -> int:
        return row.get("seq_len", self.seq_len)

    def _summarize(self, rows: list[MetricsRow]) -> TrainedStage:
        accuracies = [row["validation_accuracy"] for row in rows if "validation_accuracy" in row]
        return TrainedStage(
            seq_len=self._find_length(rows[0]),
            began=rows[0]["step"] - 1,
            steps=len(rows),
            seconds=sum(row["seconds"] for row in rows),
            accuracy=accuracies[-1] if accuracies else None,
        )


def encode_row(row: Mapping[str, Any], checkpoint: int = 0) -> str:
    """Return a line of metrics.jsonl, with its checksum.

    Args:
        row: of `lab.training.row.Row`, without its empty fields.
        checkpoint: step of the newest checkpoint, so that one that vanishes is missed.
    """
    content = json.dumps({**row, CHECKPOINT: checkpoint})
    return f'{content[:-1]}, "{CHECKSUM}": "{zlib.crc32(content.encode()):08x}"}}\n'


def _parse(file: Path, lines: list[str]) -> tuple[tuple[MetricsRow, ...], int]:
    """Return the rows in lines, and the step of the newest checkpoint.

    Raises:
        RunError: for a line that was changed, is missing, or is not a row although rows follow.
    """
    rows: list[MetricsRow] = []
    checkpoint = 0
    broken = 0
    for number, line in enumerate(lines, 1):
        row, is_sound = _parse_line(line)
        if not is_sound or (row is not None and broken):
            raise RunError(f"{file}: line {broken or number} was changed or damaged")
        if row is None:
            broken = broken or number
            continue
        if CHECKPOINT in row:
            checkpoint = row.pop(CHECKPOINT)
            if row["step"] != len(rows) + 1:
                raise RunError(f"{file}: line {number} is of step {row['step']}; lines are missing")
        rows.append(row)
    return tuple(rows), checkpoint


def _parse_line(line: str) -> tuple[MetricsRow | None, bool]:
    """Return the row in a line, if it is one, and whether it has no wrong checksum."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None, True
    if not isinstance(row, dict):
        return None, True
    checksum = row.pop(CHECKSUM, None)
    if checksum is None and CHECKPOINT in row:
        return None, False
    if checksum is not None and checksum != f"{zlib.crc32(json.dumps(row).encode()):08x}":
        return None, False
    return (row, True) if is_valid(RowLine, row) else (None, checksum is None)
