"""A training run: its settings, and the folder that holds all there is of it.

    config.json      task, model, training: enough to train again
    metrics.jsonl    one row a step
    checkpoint/      step-N folders: weights and optimizer as safetensors, state.json with digests
    history/         weights kept along the way, for analysis
    result.json      how it ended
    lengths.json     accuracy at row lengths, of a run in a sweep; spent.json, log.txt: how it went
    certificate.json what the laws found about its layers before it was trained, if they were asked
    analysis.json    what analysis measured; report.html, report.json: the page of it

Each file is written whole or not at all (`lab.files`); metrics.jsonl grows line by line. What is
read is checked once, here, against the types below. Nothing here imports torch until weights are
asked for (`lab.training.checkpoint`).
"""

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.config import ModelConfig, TrainConfig
from lab.files import (
    LEFTOVER,
    RunError,
    clear_leftovers,
    explain_write_errors,
    find_inside,
    list_inside,
    lock,
    read,
    read_json,
    remove,
    share,
    shorten_message,
    write,
    write_json,
)
from lab.training.records import ConfigFile, CoverageFile, Metrics, ResultFile, RowLine, validate
from lab.trust import ask_for_trust, list_named
from lab.user_modules import digest_source
from tasks import TASKS, restore
from tasks.base import Task
from tasks.bounds import TextChangedError
from tasks.near_names import ask, find_near

if TYPE_CHECKING:
    import torch

    from lab.models import LanguageModel
    from lab.training.loop import Row, TrainingState

FORMAT = 1
"""Format of the run folder; a newer one is refused."""
MOST_METRICS, MOST_LINE = 2**28, 2**12
"""Bytes of the largest metrics.jsonl that is read, and characters of its longest line."""
CHECKPOINT, HISTORY, STATE = "checkpoint", "history", "state.json"
CHECKPOINT_NAME = re.compile(r"step-(\d{1,18})", re.ASCII)
WEIGHTS_NAME = re.compile(r"step-(\d{1,18})\.safetensors", re.ASCII)
OWN = re.compile(
    r"(certificate|lengths|result|spent)\.json|metrics\.jsonl|log\.txt"
    r"|(analysis|report)(-(step|rows)\d+)*(-\d+)?\.(json|html)"
    r"|checkpoint|history|tensorboard|wandb-id",
    re.ASCII,
)
"""What a run puts into its folder, besides config.json."""


class OutError(RunError):
    """The folder given for a run cannot hold it: a file, another run, or not a run at all."""


@dataclass(frozen=True)
class Run:
    """The settings of a run and its folder, on disk or about to be.

    Attributes:
        path: the run folder.
        task: what is learned.
        model: the model's configuration.
        train: the training's configuration.
        trusted: whether the code and text that the run names may be imported and read: only where
            the user's own command names them, or says so.
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
    def open(cls, path: Path | str, *, trust: bool = False, named: Collection[str] = ()) -> "Run":
        """Read a run folder.

        Args:
            path: the folder.
            trust: import the code and read the text that config.json names, although the user's
                command does not.
            named: what the user's command itself names, in the words of `lab.trust.list_named`.

        Raises:
            RunError: when there is none, its config.json cannot be read or is of a newer format, or
                it names a text that only `trust` lets it read.
        """
        path = Path(path)
        try:
            config = read_json(path / "config.json", f"{path} is not a run folder")
        except RunError as error:
            near = "" if os.path.isdir(path) else _ask(path)
            raise RunError(f"{error}. {near}" if near else str(error)) from error
        if config.get("format") != FORMAT:
            raise RunError(
                f"{path}: format={config.get('format')}: must be {FORMAT}, which this lab reads"
            )
        validate(ConfigFile, config, f"{path}/config.json does not describe a run")
        wanted = list_named(config)
        trusted = trust or {*wanted} <= {*named}
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
        return _digest(self.to_dict())

    @property
    def settings(self) -> str:
        """Eight hexadecimal digits of the settings that are not at their defaults.

        Unlike `digest`, they stay the same when a later version of the lab has one field more.
        """
        kinds = (TASKS[self.task.name], ModelConfig, TrainConfig)
        values = (self.task.describe(), self.model.to_dict(), self.train.to_dict())
        return _digest(
            [
                {name: value for name, value in part.items() if value != defaults.get(name)}
                for part, defaults in zip(values, map(get_defaults, kinds), strict=True)
            ]
        )

    @property
    def _named(self) -> list[str]:
        """What the run's folder may have imported and read: nothing without trust."""
        return list_named(self.to_dict()) if self.trusted else []

    def _check_trust(self) -> None:
        """Raise a `RunError` if the run names code, and is not trusted."""
        if self.model.model is not None and not self.trusted:
            raise RunError(ask_for_trust(self.path, list_named(self.to_dict())))

    @property
    def resume_command(self) -> str:
        """The command that goes on with this run."""
        named = list_named(self.to_dict())
        return f"lab resume {self.path}{' --trust' * bool(named)}"

    def claim(self) -> None:
        """Make the folder this run's, or check that it already is.

        Raises:
            OutError: when the path is a file, or holds something else; for another configuration
                it names the first field that differs.
            RunError: when it cannot be written.
        """
        with explain_write_errors(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise OutError(f"out={self.path}: is a file, must be a folder or new")
            if os.path.lexists(self.path / "config.json"):
                self.compare()
                return
            if any(not LEFTOVER.fullmatch(name) for name in list_inside(self.path)):
                raise OutError(f"out={self.path}: is not empty and holds no run; choose another")
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config()

    @contextlib.contextmanager
    def occupy(self) -> Iterator[dict[str, Any] | None]:
        """Claim and lock the folder, for a `with` block, and clear up after a killed process.

        Yields the result of a run that has ended, solved or out of steps; else None.

        Raises:
            RunError: when the folder cannot be used or written.
        """
        self.claim()
        with lock(self.path):
            for name in ("", HISTORY, CHECKPOINT):
                clear_leftovers(find_inside(self.path, name))
            yield self.read_final_result()

    def write_config(self) -> None:
        """Write config.json, with a digest of the code of the run's own mixer.

        Raises:
            RunError: when it cannot be written, or the run names code that only trust lets it
                import.
        """
        self._check_trust()
        content = json.loads(json.dumps(self.to_dict()))
        if self.model.model is not None:
            content["source"] = self.source or digest_source(self.model.model)
        with explain_write_errors(self.path):
            write_json(self.path / "config.json", content)

    def compare(self) -> None:
        """Check that the folder holds this configuration, of a mixer whose code is as it was.

        Raises:
            OutError: naming the first field that differs, or the mixer.
            RunError: when it holds no run, or one that cannot be read.
        """
        theirs = self._compare_settings()
        # A run that was opened, to go on with, knows the code that it began with.
        change = "" if self.source is not None else theirs.describe_change()
        if change:
            raise OutError(
                f"out={self.path}: {change}; --fresh trains it anew, and `{self.resume_command}` "
                "goes on with what there is"
            )

    def _compare_settings(self) -> "Run":
        """Return the run that the folder holds, which must have these settings.

        Raises:
            OutError: naming the first field that differs.
            RunError: when it holds no run, or one that cannot be read.
        """
        theirs = Run.open(self.path, named=self._named)
        ours = self.with_precision(theirs.train.precision)
        pair = (json.loads(json.dumps(run.to_dict())) for run in (theirs, ours))
        for name, was, now in list_differences(*pair):
            raise OutError(
                f"out={self.path}: holds a run with {name}={was}, this one has {name}={now}; "
                f"choose another --out, or go on with that run: {theirs.resume_command}"
            )
        return theirs

    def with_precision(self, chosen: str) -> "Run":
        """Return this run with a precision in place of "auto"."""
        if self.train.precision != "auto":
            return self
        return replace(self, train=replace(self.train, precision=chosen))

    def recall_precision(self) -> "Run":
        """Return this run with the precision that was chosen when the run in its folder began.

        Raises:
            RunError: when config.json cannot be read.
        """
        return self.with_precision(Run.open(self.path, named=self._named).train.precision)

    def describe_change(self) -> str:
        """Say that the code of the run's own mixer has changed since it began; "" if it has not.

        Of a run that is not trusted nothing is imported, and nothing is said.
        """
        name = self.model.model
        if name is None or self.source is None or not self.trusted:
            return ""
        if digest_source(name) in (None, self.source):  # one that is missing is told elsewhere
            return ""
        return f"the code of {name} has changed since this run began"

    def begin_anew(self) -> None:
        """Remove what the folder holds of a run with these settings; other files stay.

        Raises:
            OutError: naming the first field that differs.
            RunError: when it cannot be removed, or another process trains it.
        """
        if not os.path.lexists(self.path / "config.json"):
            return
        self._compare_settings()
        with explain_write_errors(self.path), lock(self.path):
            for name in list_inside(self.path):
                if OWN.fullmatch(name):
                    remove(self.path / name)
            self.write_config()

    def set_limit(self, max_steps: int) -> "Run":
        """Return this run with another limit of steps, which is written into config.json.

        Raises:
            ValueError: for a limit below the steps already taken.
            RunError: when the run cannot be read or written, or is being trained.
        """
        result = self.read_result() or {"steps": 0}
        taken = max(result["steps"], *self.list_checkpoints(), 0)
        if max_steps < taken:
            raise ValueError(f"max_steps={max_steps}: must be ≥ {taken}, the steps already taken")
        other = replace(self, train=replace(self.train, max_steps=max_steps))
        if other != self:
            self._check_whole(self.load_state().step)  # or it could not go on
            with explain_write_errors(self.path), lock(self.path):
                other.write_config()
        return other

    def read_metrics(self) -> Metrics:
        """Read metrics.jsonl as it is now; without the file, there are no rows.

        A last line that is no row is what a killed process has left: its step will be taken again.

        Raises:
            RunError: when the file cannot be read, a line is damaged or missing, or there are fewer
                rows than the run's result has steps.
        """
        file, rows = self.path / "metrics.jsonl", []
        try:
            lines = read(file, MOST_METRICS).decode(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        except (OSError, RunError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise RunError(f"{file}: cannot be read: {why}") from error
        for number, line in enumerate(lines, 1):
            try:
                if len(line) > MOST_LINE:
                    raise ValueError(f"has {len(line):,} characters, must be ≤ {MOST_LINE:,}")
                row = validate(RowLine, json.loads(line), f"{file}: line {number} is damaged")
            except (ValueError, RecursionError, RunError) as error:
                if number == len(lines):
                    break
                raise RunError(f"{file}: line {number} is damaged: {error}") from error
            if row["step"] != number:
                raise RunError(f"{file}: line {number} is of step {row['step']}; lines are missing")
            rows.append(row)
        result = self.read_result()
        if result is not None and len(rows) < result["steps"]:
            raise RunError(f"{file}: has {len(rows)} of {result['steps']} steps; lines are missing")
        return Metrics(tuple(rows))

    @contextlib.contextmanager
    def record_rows(self) -> Iterator[Callable[["Row"], None]]:
        """Append rows to metrics.jsonl, each whole or not at all, within a `with` block."""
        with explain_write_errors(self.path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            file = os.open(self.path / "metrics.jsonl", flags, 0o666)

        def record(row: "Row") -> None:
            content = {name: value for name, value in vars(row).items() if value is not None}
            line = f"{json.dumps(content)}\n".encode()
            with explain_write_errors(self.path):
                size = os.fstat(file).st_size
                if os.write(file, line) < len(line):  # a full disk takes only the beginning
                    os.ftruncate(file, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            yield record
        finally:
            os.close(file)

    def _check_whole(self, step: int) -> Sequence[RowLine]:
        """Return the rows up to the step of the newest checkpoint, which must all be there.

        Raises:
            RunError: when the checkpoint or rows are missing.
        """
        result = self.read_result()
        # A run that diverged may have had no checkpoint yet.
        if result and result["stopped"] != "diverged" and step == 0 < result["steps"]:
            raise RunError(
                f"{self.path}: the checkpoint of step {result['steps']} is gone; put it back, or "
                "--fresh of the command that trained it begins again"
            )
        rows = self.read_metrics()[:step]
        if len(rows) < step:
            raise RunError(
                f"{self.path}: metrics.jsonl ends at step {len(rows)}, the checkpoint is of step "
                f"{step}; put it back, or --fresh of the command that trained it begins again"
            )
        return rows

    def rewind(self, step: int) -> None:
        """Drop a result that is not final, and metrics and kept weights of later steps.

        Raises:
            RunError: when rows up to this step are missing, or the folder cannot be written.
        """
        rows = self._check_whole(step)
        with explain_write_errors(self.path):
            for later, file in self.list_kept_weights().items():
                if later > step:
                    remove(file)
            with contextlib.suppress(FileNotFoundError):
                remove(self.path / "result.json")
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            write(find_inside(self.path, "metrics.jsonl"), lines)

    def read_result(self) -> dict[str, Any] | None:
        """Return the content of result.json, or None while there is none.

        Raises:
            RunError: when it cannot be read, or is not a result.
        """
        file = self.path / "result.json"
        if not os.path.lexists(file):
            return None
        advice = "remove it to conclude the run again"
        result = read_json(file, f"{file} cannot be read; {advice}")
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
        if result is None or result["stopped"] not in ("solved", "budget"):
            return None
        # A run that ended below the limit, and not at a stage's, has been given a later limit.
        if result["stopped"] == "budget" and self._goes_on(result):
            return None
        return result

    def _goes_on(self, result: Mapping[str, Any]) -> bool:
        """Whether a run that is out of steps has steps left by its settings."""
        at_full = result["seq_len"] == (result["stages"] or [result])[-1]["seq_len"]
        in_stage = result["stages"][-1]["steps"] if result["stages"] else 0
        stopped_by_stage = not at_full and in_stage >= self.train.stage_steps
        return result["steps"] < self.train.max_steps and not stopped_by_stage

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json.

        Raises:
            RunError: when it cannot be written.
        """
        with explain_write_errors(self.path):
            write_json(self.path / "result.json", result)

    def read_coverage(self, step: int) -> set[str] | None:
        """Return the analyses that the run's report has, or that do not apply; None without one.

        Args:
            step: of the weights that the report must be of.

        Raises:
            RunError: when the report's numbers cannot be read.
        """
        file = self.path / "analysis.json"
        if not os.path.lexists(file):
            return None
        where = f"{file} cannot be read; move it away to begin a new one"
        numbers = validate(CoverageFile, read_json(file, where), where)
        return (
            {*numbers["analyses"], *numbers["not_applicable"]} if numbers["step"] == step else None
        )

    def list_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoint folders by step, oldest first.

        One without its state is what is left of a checkpoint that was being removed.

        Raises:
            RunError: where a link is in the way.
        """
        names = map(CHECKPOINT_NAME.fullmatch, list_inside(self.path, CHECKPOINT))
        found = {
            int(name[1]): find_inside(self.path, f"{CHECKPOINT}/{name[0]}")
            for name in names
            if name
        }
        newest = max(found, default=0)
        return {n: f for n, f in sorted(found.items()) if n == newest or (f / STATE).exists()}

    def list_kept_weights(self) -> dict[int, Path]:
        """Return the files in history/ by step, oldest first."""
        names = map(WEIGHTS_NAME.fullmatch, list_inside(self.path, HISTORY))
        return {int(name[1]): self.path / HISTORY / name[0] for name in names if name}

    def list_steps(self) -> list[int]:
        """Return the steps whose weights there are: 0, the kept ones and the checkpoints'."""
        return sorted({0, *self.list_kept_weights(), *self.list_checkpoints()})

    def share_checkpoints(self) -> AbstractContextManager[None]:
        """Keep training from removing checkpoints, for a `with` block that reads them."""
        return share(self.path / CHECKPOINT)

    def build(self) -> "LanguageModel":
        """Return the model with its initial weights.

        Raises:
            ValueError: for a model that cannot be built, that memory does not hold, or for which
                there is no construction.
            RunError: when it names code that only trust in the run lets it import.
        """
        from lab.training.checkpoint import build_model

        self._check_trust()
        return build_model(self)

    def load_state(
        self, device: "torch.device | str" = "cpu", step: int | None = None
    ) -> "TrainingState":
        """Return the state of a checkpoint, or the initial one when there is none.

        Args:
            device: where the model goes.
            step: which checkpoint; None takes the newest.

        Raises:
            RunError: when the checkpoint is missing, truncated, tampered with, or does not fit,
                or the model cannot be built.
        """
        from lab.training.checkpoint import load_state

        return load_state(self, device, step)

    def load_model(self, step: int) -> "LanguageModel":
        """Return the model as it was after a step, in evaluation mode, on the CPU.

        Raises:
            RunError: when there are no such weights, they cannot be read or do not fit, or the
                model cannot be built.
        """
        from lab.training.checkpoint import load_model

        return load_model(self, step)


def get_defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the default of each field of a dataclass that has one."""
    made = {f.name: f.default_factory() for f in fields(kind) if f.default_factory is not MISSING}
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING} | made


def list_differences(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Yield each field that differs between two configurations, with its two values."""
    for part in ("task", "model", "train"):
        for name in {**theirs[part], **ours[part]}:
            was, now = theirs[part].get(name), ours[part].get(name)
            if was != now:
                yield f"{part}.{name}", was, now


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _ask(missing: Path) -> str:
    """Ask whether the run that a file is in, or one of a near name, was meant; "" if there is none.

    Where access is denied, os.path and glob find nothing; pathlib would raise.
    """
    if os.path.isfile(missing) and os.path.isfile(missing.with_name("config.json")):
        return ask([str(missing.parent)])
    known = glob("*/config.json", root_dir=missing.parent)
    near = find_near(missing.name, (os.path.dirname(file) for file in known))
    return ask(str(missing.with_name(name)) for name in near)
