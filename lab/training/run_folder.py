"""What a run folder says in words and numbers, read without importing torch."""

import hashlib
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from lab.config import ModelConfig, TrainConfig
from lab.files import FORMAT, RunError, explain_write_errors, lock, shorten_message
from lab.folder import LEFTOVER, Folder
from lab.training.differences import get_defaults, list_differences
from lab.training.metrics import Metrics
from lab.training.schema import ConfigFile, ResultFile, validate
from lab.trust import ask_for_trust, is_trusted, list_named, sign
from lab.user_modules import digest_source
from tasks import TASKS, restore
from tasks.base import Task
from tasks.corpus import TextChangedError
from tasks.near_names import ask, find_near

OWN = re.compile(
    r"(analysis|certificate|report|result(\.step-\d+)?)\.json|metrics\.jsonl|report\.html"
    r"|checkpoint|history|tensorboard|wandb-id",
    re.ASCII,
)
"""What a run puts into its folder, besides config.json."""
Kind = TypeVar("Kind", bound="RunFolder")
"""The class that `open` is called on. Types that are checked at every call cannot be Self."""


class OutError(RunError):
    """The folder given for a run cannot hold it: a file, another run, or not a run at all."""


@dataclass(frozen=True)
class RunFolder:
    """The settings, metrics and result of a run, on disk or about to be.

    Attributes:
        path: the run folder.
        task: what is learned.
        model: the model's configuration.
        train: the training's configuration.
        trusted: whether the code that the model names may run; one's own may.
        source: digest of the code of the mixer that the run names, when the run began; None where
            it names none.
    """

    path: Path
    task: Task
    model: ModelConfig
    train: TrainConfig
    trusted: bool = field(default=True, compare=False)
    source: str | None = field(default=None, compare=False)

    @classmethod
    def open(
        cls: type[Kind], path: Path | str, *, trust: bool = False, named: Collection[str] = ()
    ) -> Kind:
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
        try:
            config = Folder(path).read_json("config.json", f"{path} is not a run folder")
        except RunError as error:
            near = "" if os.path.isdir(path) else _ask(path)
            raise RunError(f"{error}. {near}" if near else str(error)) from error
        if config.get("format") != FORMAT:
            raise RunError(
                f"{path}: format {config.get('format')} is newer than this lab's {FORMAT}, or none"
            )
        validate(ConfigFile, config, f"{path}/config.json does not describe a run")
        wanted = list_named(config)
        trusted = trust or {*wanted} <= {*named} or is_trusted(config, config.get("signature"))
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
        return cls(path, task, model, train, trusted, config.get("source"))

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
                self.compare()
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
        if self.model.model is not None:
            content["source"] = self.source or digest_source(self.model.model)
        Folder(self.path).write_json("config.json", content)

    def compare(self) -> None:
        """Check that the folder holds this configuration, of a mixer whose code is as it was.

        Raises:
            OutError: naming the first field that differs, or the mixer.
            RunError: when it holds no run, or one that cannot be read.
        """
        change = self._compare_settings().describe_change()
        if change:
            raise OutError(
                f"out={self.path}: {change}; --fresh trains it anew, and `lab resume {self.path}` "
                "goes on with what there is"
            )

    def _compare_settings(self) -> "RunFolder":
        """Return the run that the folder holds, which must have these settings.

        Raises:
            OutError: naming the first field that differs.
            RunError: when it holds no run, or one that cannot be read.
        """
        theirs = RunFolder.open(self.path, named=list_named(self.to_dict()))
        ours = self.with_precision(theirs.train.precision)
        pair = (json.loads(json.dumps(run.to_dict())) for run in (theirs, ours))
        for name, was, now in list_differences(*pair):
            raise OutError(
                f"out={self.path}: holds a run with {name}={was}, this one has {name}={now}; "
                f"choose another --out, or go on with that run: lab resume {self.path}"
            )
        return theirs

    def with_precision(self: Kind, chosen: str) -> Kind:
        """Return this run with a precision in place of "auto"."""
        if self.train.precision != "auto":
            return self
        return replace(self, train=replace(self.train, precision=chosen))

    def recall_precision(self: Kind) -> Kind:
        """Return this run with the precision that was chosen when the run in its folder began.

        Raises:
            RunError: when config.json cannot be read.
        """
        named = list_named(self.to_dict())
        return self.with_precision(RunFolder.open(self.path, named=named).train.precision)

    def describe_change(self) -> str:
        """Say that the code of the run's own mixer has changed since it began; "" if it has not.

        Of a run that is not trusted nothing is imported, and nothing is said.
        """
        name = self.model.model
        if name is None or self.source is None or not self.trusted:
            return ""
        if digest_source(name) == self.source:
            return ""
        return f"the code of {name} has changed since this run began"

    def begin_anew(self) -> None:
        """Remove what the folder holds of a run with these settings; other files stay.

        Raises:
            OutError: naming the first field that differs.
            RunError: when it cannot be removed, or another process trains it.
        """
        if not self.path.is_dir() or not Folder(self.path).exists("config.json"):
            return
        self._compare_settings()
        folder = Folder(self.path)
        with explain_write_errors(self.path), lock(self.path):
            for name in folder.list():
                if OWN.fullmatch(name):
                    folder.remove(name)
            self.write_config()

    def read_metrics(self) -> Metrics:
        """Read metrics.jsonl as it is now.

        Raises:
            RunError: when the file cannot be read.
        """
        return Metrics.read(self.path / "metrics.jsonl", self.task.seq_len)

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

    def read_final_result(self) -> dict[str, Any] | None:
        """Return the result of a run that has ended, solved or out of steps; else None.

        Raises:
            RunError: as `read_result`.
        """
        result = self.read_result()
        return result if result is not None and result["stopped"] in ("solved", "budget") else None

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json.

        Raises:
            RunError: when it cannot be written.
        """
        with explain_write_errors(self.path):
            Folder(self.path).write_json("result.json", result, sealed=True)


def _ask(missing: Path) -> str:
    """Ask whether the run that a file is in, or one of a near name, was meant; "" if there is none.

    Where access is denied, os.path and glob find nothing; pathlib would raise.
    """
    if os.path.isfile(missing) and os.path.isfile(missing.with_name("config.json")):
        return ask([str(missing.parent)])
    known = glob("*/config.json", root_dir=missing.parent)
    near = find_near(missing.name, (os.path.dirname(file) for file in known))
    return ask(str(missing.with_name(name)) for name in near)
