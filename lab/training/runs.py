"""The run folder: the only thing that crosses from training to analysis.

    config.json      task, model, training: enough to train again
    metrics.jsonl    one row a step
    checkpoint/      step-N folders: weights and optimizer as safetensors, state.json with digests
    history/         weights kept along the way, for analysis
    result.json      how it ended
    analysis.json    what analysis measured; report.html, report.json: the page of it

Every file is written under a temporary name and then renamed, so it is never half there. Only
metrics.jsonl grows line by line. Loading unpickles nothing.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.constructions import construct
from lab.files import RunError, explain_write_errors
from lab.folder import Folder
from lab.lengthening import list_stages
from lab.models import LanguageModel, build
from lab.models.memory import refuse_weights
from lab.training import checkpoint, history
from lab.training.metrics import encode_row
from lab.training.row import Row
from lab.training.run_folder import RunFolder
from lab.training.state import TrainingState, start
from lab.trust import ask_for_trust, list_named


@dataclass(frozen=True)
class Run(RunFolder):
    """A training run: what its folder says, and its weights."""

    @classmethod
    def of(cls, folder: RunFolder) -> "Run":
        """Return the run of a folder that was read, or described, without torch."""
        return cls(**vars(folder))

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
                if written < len(line):  # a full disk takes only the beginning
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
