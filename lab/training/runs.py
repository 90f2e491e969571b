"""The run folder: the only thing that crosses from training to analysis.

    config.json      task, model, training: enough to train again
    metrics.jsonl    one row a step
    checkpoint/      step-N folders: weights and optimiser as safetensors, state.json with digests
    history/         weights kept along the way, for analysis
    result.json      how it ended
    analysis.json    what analysis measured, report.html what it made of it

Files are written under a temporary name and renamed, so that none is ever half there; metrics.jsonl
alone grows by lines. Nothing is unpickled on load.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import polars as pl
import torch

from lab.config import ModelConfig, TrainConfig
from lab.constructions import solved
from lab.files import FORMAT, RunError, read_json, write, write_json, writing
from lab.lengthening import stages
from lab.models import LanguageModel, build
from lab.training import checkpoint, history
from lab.training.fit import Row, State, start
from tasks import described
from tasks.base import Task
from tasks.corpus import TextChangedError


class OutError(RunError):
    """The folder given for a run cannot hold it: a file, another run, or not a run at all."""


@dataclass(frozen=True)
class Run:
    """A training run on disk, or about to be.

    Attributes:
        path: the run folder.
        task: what is learned.
        model: the model's configuration.
        train: the training's configuration.
    """

    path: Path
    task: Task
    model: ModelConfig
    train: TrainConfig

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """Read a run folder.

        Raises:
            RunError: when there is none, or its config.json cannot be read or is of a newer format.
        """
        path = Path(path)
        config = read_json(path / "config.json", f"{path} is no run folder")
        if config.get("format") != FORMAT:
            raise RunError(
                f"{path}: format {config.get('format')} is newer than this lab's {FORMAT}, or none"
            )
        try:
            task = described(config["task"])
            model = ModelConfig.from_dict(config["model"])
            return cls(path, task, model, TrainConfig.from_dict(config["train"]))
        except TextChangedError as error:
            raise RunError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path}/config.json is not a run's: {error}") from error

    def config(self) -> dict[str, Any]:
        """Return what config.json holds."""
        return {
            "format": FORMAT,
            "task": self.task.described(),
            "model": self.model.to_dict(),
            "train": self.train.to_dict(),
        }

    def digest(self) -> str:
        """Return eight hexadecimal digits of the configuration, the default folder's name."""
        return hashlib.sha256(json.dumps(self.config(), sort_keys=True).encode()).hexdigest()[:8]

    def claim(self) -> None:
        """Make the folder this run's, or find that it already is.

        Raises:
            OutError: when the path is a file, or holds something else; another configuration is
                answered with the first field that differs.
            RunError: when it cannot be written.
        """
        with writing(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise OutError(f"out={self.path}: is a file, must be a folder or new")
            if (self.path / "config.json").exists():
                self._compare()
                return
            if self.path.exists() and any(self.path.iterdir()):
                raise OutError(f"out={self.path}: is not empty and holds no run; choose another")
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", self.config())

    def _compare(self) -> None:
        """Hold the configuration against the folder's."""
        theirs, ours = (json.loads(json.dumps(run.config())) for run in (Run.open(self.path), self))
        for name, was, now in _differences(theirs, ours):
            raise OutError(
                f"out={self.path}: holds a run with {name}={was}, this one has {name}={now}; "
                "choose another --out"
            )

    def build(self) -> LanguageModel:
        """Return the model with its initial weights.

        Raises:
            ValueError: for a model that cannot be built, or whose weights cannot be set by hand.
        """
        if self.train.init == "oracle":
            return solved(self.task, self.model, self.train.seed)
        return build(**self.model.to_dict(), vocab_size=self.task.vocab_size, seed=self.train.seed)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, oldest first; lines that are no rows are left out.

        A run killed while it wrote leaves such a line; its step will be taken again.

        Raises:
            RunError: when the file cannot be read.
        """
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return []
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError as error:
            raise RunError(f"{file}: cannot be read: {error.strerror}") from error
        rows = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                if isinstance(row, dict) and all(
                    isinstance(row.get(name), Number)
                    for name in ("step", "loss", "accuracy", "seconds")
                ):
                    rows.append(row)
        return rows

    def last_test(self) -> dict[str, Any]:
        """Return the newest row of metrics.jsonl with a test of the model; empty if none has."""
        tested = [row for row in self.metrics() if "test_accuracy" in row]
        return tested[-1] if tested else {}

    def evaluations(self) -> list[dict[str, Any]]:
        """Return what held-out rows said along the way, oldest first: step, loss, accuracy.

        They are validation rows of the length trained at; in runs from before those, test rows.
        """
        found = []
        for row in self.metrics():
            split = "validation" if "validation_accuracy" in row else "test"
            loss, accuracy = (row.get(f"{split}_{name}") for name in ("loss", "accuracy"))
            if loss is not None and accuracy is not None:
                found.append({"step": row["step"], "loss": loss, "accuracy": accuracy})
        return found

    def stages(self) -> list[dict[str, Any]]:
        """Return the parts of training by row length, as far as they went.

        Each has seq_len, steps, seconds, and the newest validation accuracy there was (or None).
        """
        found: list[dict[str, Any]] = []
        for row in self.metrics():
            seq_len = row.get("seq_len", self.task.seq_len)
            if not found or found[-1]["seq_len"] != seq_len:
                begun = {"seq_len": seq_len, "steps": 0, "seconds": 0.0, "accuracy": None}
                found.append(begun)
            stage = found[-1]
            stage["steps"] += 1
            stage["seconds"] += row["seconds"]
            stage["accuracy"] = row.get("validation_accuracy", stage["accuracy"])
        return found

    def rewind(self, step: int) -> None:
        """Drop the rows and the kept weights of later steps: those will be taken again.

        Raises:
            RunError: when the folder cannot be written.
        """
        kept = [row for row in self.metrics() if row["step"] <= step]
        with writing(self.path):
            history.rewind(self.path, step)
            write(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[Row], None]]:
        """Append rows to metrics.jsonl for the length of a `with` block."""

        def record(row: Row) -> None:
            with writing(self.path):
                print(json.dumps(_filled(row)), file=file)

        with contextlib.ExitStack() as stack:
            with writing(self.path):
                file = stack.enter_context(open(self.path / "metrics.jsonl", "a", buffering=1))
            yield record

    def checkpoints(self) -> dict[int, Path]:
        """Return the checkpoint folders by step, oldest first."""
        return checkpoint.saved(self.path)

    def save(self, state: State) -> None:
        """Write a checkpoint, then drop the one before it.

        Raises:
            RunError: when it cannot be written; the checkpoint before it is still there.
        """
        with writing(self.path):
            checkpoint.save(self.path, state)

    def load(self, device: torch.device | str = "cpu", step: int | None = None) -> State:
        """Return the state of a checkpoint, or the initial one when there is none.

        Args:
            device: where the model goes.
            step: which checkpoint; None takes the newest.

        Raises:
            RunError: when the checkpoint is missing, truncated, tampered with, or does not fit,
                or the model cannot be built.
        """
        try:
            state = start(self.build().to(device), self.train)
        except ValueError as error:
            raise RunError(f"{self.path}: {error}") from error
        saved = self.checkpoints()
        if step is None:
            if not saved:
                return state
            step = max(saved)
        if step not in saved:
            raise RunError(
                f"{self.path}: no checkpoint of step {step}; has {list(saved) or 'none'}"
            )
        state = checkpoint.restore(saved[step], state, self.train.batch_size)
        parts = len(stages(self.task, self.train))
        if state.stage >= parts:
            raise RunError(f"{saved[step]}: is of stage {state.stage}, this run has {parts}")
        return state

    def keep(self, state: State) -> None:
        """Keep the weights after this step, for analysis; those that are not finite are not kept.

        Raises:
            RunError: when they cannot be written; nothing half-written stays.
        """
        with writing(self.path):
            history.save(self.path, state.step, state.model)

    def steps(self) -> list[int]:
        """Return the steps whose weights there are: 0, the kept ones and the checkpoints'."""
        return sorted({0, *history.saved(self.path), *self.checkpoints()})

    def weights(self, step: int) -> LanguageModel:
        """Return the model as it was after a step, in evaluation mode, on the CPU.

        Raises:
            RunError: when there are no such weights, they cannot be read or do not fit, or the
                model cannot be built.
        """
        if step not in self.steps():
            has = ", ".join(map(str, self.steps()))
            raise RunError(f"{self.path}: no weights of step {step}; has {has}")
        if step in self.checkpoints():
            return self.load("cpu", step).model.eval()
        try:
            model = self.build().eval()
        except ValueError as error:
            raise RunError(f"{self.path}: {error}") from error
        kept = history.saved(self.path)
        return history.restore(kept[step], model) if step in kept else model

    def result(self) -> dict[str, Any] | None:
        """Return result.json, or None while there is none.

        Raises:
            RunError: when it cannot be read, or is not a result.
        """
        file = self.path / "result.json"
        if not file.exists():
            return None
        result = read_json(file, f"{file} cannot be read; remove it to conclude the run again")
        if not _is_result(result):
            raise RunError(f"{file} holds no result; remove it to conclude the run again")
        return result

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json.

        Raises:
            RunError: when it cannot be written.
        """
        with writing(self.path):
            write_json(self.path / "result.json", result)


def find(root: Path) -> list[Run]:
    """Return the readable runs at or below a folder, by path."""
    runs = []
    for file in sorted(root.rglob("config.json")):
        with contextlib.suppress(RunError):
            runs.append(Run.open(file.parent))
    return runs


def table(runs: list[Run]) -> pl.DataFrame:
    """Return one row a run: path, task, stack, sizes, accuracy, steps, seconds, how it ended."""
    columns = {
        "path": pl.String,
        "task": pl.String,
        "model": pl.String,
        "seq_len": pl.Int64,
        "d_model": pl.Int64,
        "seed": pl.Int64,
        "accuracy": pl.Float64,
        "steps": pl.Int64,
        "seconds": pl.Float64,
        "stopped": pl.String,
    }
    rows = []
    for run in runs:
        try:
            result = run.result() or {"stopped": "unfinished"}
        except RunError:
            result = {"stopped": "unreadable"}
        rows.append(
            {
                "path": str(run.path),
                "task": run.task.name,
                "model": run.model.model or run.model.stack,
                "seq_len": run.task.seq_len,
                "d_model": run.model.d_model,
                "seed": run.train.seed,
                "accuracy": result.get("accuracy"),
                "steps": result.get("steps"),
                "seconds": result.get("seconds"),
                "stopped": result["stopped"],
            }
        )
    return pl.DataFrame(rows, schema=columns)


def _is_result(found: dict[str, Any]) -> bool:
    """Whether an object has what analysis reads of a result."""
    rules = found.get("baselines")
    return (
        {"stopped", "accuracy", "steps", "seconds"} <= found.keys()
        and isinstance(found["accuracy"], Number | None)
        and isinstance(rules, dict)
        and (not rules or {"chance", "oracle"} <= rules.keys())
        and all(isinstance(score, Number) for score in rules.values())
    )


def _filled(row: Row) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if value is not None}


def _differences(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> Iterator[tuple[str, object, object]]:
    for part in ("task", "model", "train"):
        for name in {**theirs[part], **ours[part]}:
            was, now = theirs[part].get(name), ours[part].get(name)
            if was != now:
                yield f"{part}.{name}", was, now
