"""The run folder: the only thing that crosses from training to analysis.

    config.json      task, model, training: enough to train again
    metrics.jsonl    one row a step
    checkpoint/      step-N folders: weights and optimiser as safetensors, state.json with digests
    history/         weights kept along the way, for analysis
    result.json      how it ended
    analysis.json    what analysis measured; report.html, report.json: the page of it

Every file is written under a temporary name and then renamed, so it is never half there. Only
metrics.jsonl grows line by line. Loading unpickles nothing.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lab.config import ModelConfig, TrainConfig
from lab.constructions import construct
from lab.files import FORMAT, RunError, explain_write_errors, shorten_message
from lab.folder import LEFTOVER, Folder
from lab.lengthening import list_stages
from lab.models import LanguageModel, build
from lab.models.room import refuse_weights
from lab.training import checkpoint, history
from lab.training.differences import get_defaults, list_differences
from lab.training.fit import Row, TrainingState, start
from lab.training.metrics import Metrics, encode_row
from lab.training.schema import ConfigFile, ResultFile, validate
from lab.trust import ask_for_trust, is_own, list_named, sign
from tasks import TASKS, restore
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
        trusted: whether the code that the model names may run; one's own may.
    """

    path: Path
    task: Task
    model: ModelConfig
    train: TrainConfig
    trusted: bool = field(default=True, compare=False)

    @classmethod
    def open(cls, path: Path | str, *, trust: bool = False, named: Collection[str] = ()) -> "Run":
        """Read a run folder.

        Args:
            path: the folder.
            trust: import and read what config.json names, although it is not known to come from a
                command of this user.
            named: what the user's command itself names, in the words of `lab.trust.list_named`.

        Raises:
            RunError: when there is none, its config.json cannot be read or is of a newer format, or
                it names a text that only `trust` lets it read.
        """
        path = Path(path)
        config = Folder(path).read_json("config.json", f"{path} is not a run folder")
        if config.get("format") != FORMAT:
            raise RunError(
                f"{path}: format {config.get('format')} is newer than this lab's {FORMAT}, or none"
            )
        validate(ConfigFile, config, f"{path}/config.json does not describe a run")
        wanted = list_named(config)
        trusted = trust or {*wanted} <= {*named} or is_own(config, config.get("signature"))
        if not trusted and config["task"].get("path") is not None:
            raise RunError(ask_for_trust(path, wanted))
        try:
            task = restore(config["task"])
            model = ModelConfig.from_dict(config["model"])
            train = TrainConfig.from_dict(config["train"])
        except TextChangedError as error:
            raise RunError(f"{path}: {error}") from error
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            reason = shorten_message(error)
            raise RunError(f"{path}/config.json does not describe a run: {reason}") from error
        return cls(path, task, model, train, trusted)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "format": FORMAT,
            "task": self.task.describe(),
            "model": self.model.to_dict(),
            "train": self.train.to_dict(),
        }

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of the configuration, for the default folder's name."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]

    @property
    def settings(self) -> str:
        """Eight hexadecimal digits of the settings that are not at their defaults.

        Unlike `digest`, they stay the same when a later version of the lab has one field more.
        """
        kinds = (TASKS[self.task.name], ModelConfig, TrainConfig)
        values = (self.task.describe(), self.model.to_dict(), self.train.to_dict())
        changed = [
            {name: value for name, value in part.items() if value != defaults.get(name)}
            for part, defaults in zip(values, map(get_defaults, kinds), strict=True)
        ]
        return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]

    def claim(self) -> None:
        """Make the folder this run's, or check that it already is.

        Raises:
            OutError: when the path is a file, or holds something else; for another configuration
                it names the first field that differs.
            RunError: when it cannot be written.
        """
        folder = Folder(self.path)
        with explain_write_errors(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise OutError(f"out={self.path}: is a file, must be a folder or new")
            if self.path.exists() and folder.exists("config.json"):
                self._compare()
                return
            if self.path.exists() and any(not LEFTOVER.fullmatch(name) for name in folder.list()):
                raise OutError(f"out={self.path}: is not empty and holds no run; choose another")
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config()

    def write_config(self) -> None:
        """Write config.json, signed if it names code or text that a command of this user named.

        Raises:
            OSError: when it cannot be written.
        """
        content = json.loads(json.dumps(self.to_dict()))
        signature = sign(content) if self.trusted else None
        if signature is not None:
            content["signature"] = signature
        Folder(self.path).write_json("config.json", content)

    def _compare(self) -> None:
        """Check that the folder holds this configuration."""
        theirs = Run.open(self.path, named=list_named(self.to_dict()))
        pair = (json.loads(json.dumps(run.to_dict())) for run in (theirs, self))
        for name, was, now in list_differences(*pair):
            raise OutError(
                f"out={self.path}: holds a run with {name}={was}, this one has {name}={now}; "
                f"choose another --out, or go on with that run: lab resume {self.path}"
            )

    def build(self) -> LanguageModel:
        """Return the model with its initial weights.

        Raises:
            ValueError: for a model that cannot be built, that memory does not hold, or for which
                there is no construction.
            RunError: when it names code that only trust in the run lets it import.
        """
        if self.model.model is not None and not self.trusted:
            raise RunError(ask_for_trust(self.path, list_named(self.to_dict())))
        vocab_size, seed = self.task.vocab_size, self.train.seed
        with refuse_weights(self.model, vocab_size):
            if self.train.init == "oracle":
                return construct(self.task, self.model, seed)
            return build(**self.model.to_dict(), vocab_size=vocab_size, seed=seed)

    def read_metrics(self) -> Metrics:
        """Read metrics.jsonl as it is now.

        Raises:
            RunError: when the file cannot be read.
        """
        return Metrics.read(self.path / "metrics.jsonl", self.task.seq_len)

    def rewind(self, step: int) -> None:
        """Drop metrics and kept weights of later steps, and all checkpoints but that of this one.

        Raises:
            RunError: when the folder cannot be written.
        """
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        with explain_write_errors(self.path):
            checkpoint.keep_only(self.path, step)
            history.rewind(self.path, step)
            self.write_metrics(rows)

    def write_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write metrics.jsonl anew.

        Raises:
            OSError: when it cannot be written.
        """
        newest = max(self.list_checkpoints(), default=0)
        lines = "".join(encode_row(row, newest) for row in rows)
        Folder(self.path).write("metrics.jsonl", lines)

    @contextlib.contextmanager
    def record_rows(self) -> Iterator[Callable[[Row], None]]:
        """Append rows to metrics.jsonl, each whole or not at all, within a `with` block."""
        with explain_write_errors(self.path):
            file = Folder(self.path).open_to_append("metrics.jsonl")

        def record(row: Row) -> None:
            content = {name: value for name, value in vars(row).items() if value is not None}
            line = encode_row(content, max(self.list_checkpoints(), default=0)).encode()
            with explain_write_errors(self.path):
                size = os.fstat(file).st_size
                written = os.write(file, line)
                if written < len(line):  # a disk that is full takes the beginning
                    os.ftruncate(file, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            yield record
        finally:
            os.close(file)

    def clear_leftovers(self) -> None:
        """Remove what a training process that was killed left behind."""
        for name in ("", "history", checkpoint.HOME):
            Folder(self.path).clear_leftovers(name)

    def share_checkpoints(self) -> contextlib.AbstractContextManager[None]:
        """Keep training from removing checkpoints, for a `with` block that reads them."""
        return Folder(self.path).share(checkpoint.HOME)

    def list_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoint folders by step, oldest first."""
        return checkpoint.list_checkpoints(self.path)

    def save_checkpoint(self, state: TrainingState, *, keep_before: bool = False) -> None:
        """Write a checkpoint, then drop those before it, unless they are to be kept.

        Raises:
            RunError: when it cannot be written; the checkpoint before it is still there.
        """
        with explain_write_errors(self.path):
            checkpoint.save(self.path, state)
            if not keep_before:
                checkpoint.keep_only(self.path, state.step)

    def load_state(
        self, device: torch.device | str = "cpu", step: int | None = None
    ) -> TrainingState:
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
        known = self.list_checkpoints()
        if step is None and not known:
            return state
        step = max(known) if step is None else step
        if step not in known:
            raise RunError(
                f"{self.path}: no checkpoint of step {step}; has {list(known) or 'none'}"
            )
        state = checkpoint.restore(known[step], state, self.train.batch_size)
        stages = len(list_stages(self.task, self.train))
        if state.stage >= stages:
            raise RunError(f"{known[step]}: is of stage {state.stage}, this run has {stages}")
        return state

    def keep_weights(self, state: TrainingState) -> None:
        """Keep the weights after this step for analysis, unless one is not finite.

        Raises:
            RunError: when they cannot be written; nothing half-written stays.
        """
        with explain_write_errors(self.path):
            history.save(self.path, state.step, state.model)

    def list_steps(self) -> list[int]:
        """Return the steps whose weights there are: 0, the kept ones and the checkpoints'."""
        return sorted({0, *history.list_weights(self.path), *self.list_checkpoints()})

    def load_model(self, step: int) -> LanguageModel:
        """Return the model as it was after a step, in evaluation mode, on the CPU.

        Raises:
            RunError: when there are no such weights, they cannot be read or do not fit, or the
                model cannot be built.
        """
        if step not in self.list_steps():
            known = ", ".join(map(str, self.list_steps()))
            raise RunError(f"{self.path}: no weights of step {step}; has {known}")
        if step in self.list_checkpoints():
            return self.load_state("cpu", step).model.eval()
        try:
            model = self.build().eval()
        except ValueError as error:
            raise RunError(f"{self.path}: {error}") from error
        kept = history.list_weights(self.path)
        return history.restore(kept[step], model) if step in kept else model

    def read_result(self) -> dict[str, Any] | None:
        """Return the content of result.json, or None while there is none.

        Raises:
            RunError: when it cannot be read, or is not a result.
        """
        folder, file = Folder(self.path), self.path / "result.json"
        if not folder.exists(file.name):
            return None
        advice = "remove it to conclude the run again"
        result = folder.read_json(file.name, f"{file} cannot be read; {advice}")
        validate(ResultFile, result, f"{file} holds no result; {advice}")
        scores = result["baselines"]
        if scores and not {"chance", "oracle"} <= scores.keys():
            raise RunError(f"{file} holds no result; {advice}: baselines lack chance or oracle")
        return result

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json.

        Raises:
            RunError: when it cannot be written.
        """
        with explain_write_errors(self.path):
            Folder(self.path).write_json("result.json", result, sealed=True)
