"""The metrics of a run, one row a step: read once, then asked for stages and evaluations."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any, overload

from lab.files import RunError

MetricsRow = dict[str, Any]
"""A `lab.training.fit.Row` without its empty fields; rows of older runs have fewer fields."""


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
        seq_len: row length of the task, for rows from before lengthening, which do not tell theirs.
    """

    rows: tuple[MetricsRow, ...]
    seq_len: int

    @classmethod
    def read(cls, file: Path, seq_len: int) -> "Metrics":
        """Read a file; none is an empty one. Lines that are no rows are left out.

        A run killed while it wrote leaves such a line; its step will be taken again.

        Raises:
            RunError: when the file cannot be read.
        """
        if not file.exists():
            return cls((), seq_len)
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError as error:
            raise RunError(f"{file}: cannot be read: {error.strerror}") from error
        return cls(tuple(_parse(lines)), seq_len)

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
        """The evaluations on held-out rows, oldest first: step, loss, accuracy.

        They are on validation rows of the length trained at; in runs from before there was a
        validation split, on test rows.
        """
        found = []
        for row in self.rows:
            split = "validation" if "validation_accuracy" in row else "test"
            loss, accuracy = (row.get(f"{split}_{name}") for name in ("loss", "accuracy"))
            if loss is not None and accuracy is not None:
                found.append({"step": row["step"], "loss": loss, "accuracy": accuracy})
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


def _parse(lines: list[str]) -> Iterator[MetricsRow]:
    """Yield the lines that are rows."""
    needed = ("step", "loss", "accuracy", "seconds")
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict) and all(isinstance(row.get(n), Number) for n in needed):
                yield row
