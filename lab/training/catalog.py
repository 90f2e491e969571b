"""All runs below a folder, a table of them, and which of them have given settings."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from lab.config import ModelConfig, TrainConfig, get_protocol_defaults
from lab.files import RunError, escape_controls
from lab.training.endings import find_ending
from lab.training.run_folder import RunFolder
from tasks import TASKS
from tasks.base import Schedule

COLUMNS = {
    "path": pl.String,
    "task": pl.String,
    "model": pl.String,
    "options": pl.String,
    "seq_len": pl.Int64,
    "d_model": pl.Int64,
    "seed": pl.Int64,
    "accuracy": pl.Float64,
    "chance": pl.Float64,
    "steps": pl.Int64,
    "seconds": pl.Float64,
    "date": pl.String,
    "stopped": pl.String,
}
"""`options` are those that differ from the defaults. `date` is the local time of the last step."""


def find_runs(
    root: Path, on_unreadable: Callable[[str], None] = lambda reason: None
) -> list[RunFolder]:
    """Return the readable runs at or below a folder, by path.

    Args:
        root: the folder.
        on_unreadable: called with the reason why a run is left out.
    """
    runs = []
    for file in sorted(root.rglob("config.json")):
        try:
            runs.append(RunFolder.open(file.parent))
        except RunError as error:
            on_unreadable(str(error))
    return runs


def select_runs(runs: Sequence[RunFolder], chosen: Sequence[str]) -> list[RunFolder]:
    """Return the runs that have the given values, each "NAME=VALUE".

    A run must have one of the values given for each name. A name is a column of the table or an
    option of `lab TASK`, including options of layers such as S.d_state.

    Raises:
        ValueError: for text of another form, or a name that is neither.
    """
    values = {run.path: _list_values(run) for run in runs}
    known = dict.fromkeys(name for found in values.values() for name in found)
    if not runs:
        kinds = (*TASKS.values(), ModelConfig, TrainConfig)
        known = dict.fromkeys([*COLUMNS, *(f.name for kind in kinds for f in fields(kind))])
    wanted: dict[str, list[str]] = {}
    for text in chosen:
        name, equals, value = text.partition("=")
        name = name if name in known else name.replace("-", "_")
        of_layer = not runs and "." in name  # the runs would know which options layers have
        if not equals or not (name in known or of_layer):
            raise ValueError(f"only={text}: must be NAME=VALUE with one of {', '.join(known)}")
        wanted.setdefault(name, []).append(value)
    return [
        run
        for run in runs
        if all(
            any(_equals(values[run.path].get(name), text) for text in texts)
            for name, texts in wanted.items()
        )
    ]


def tabulate(runs: Sequence[RunFolder]) -> pl.DataFrame:
    """Return a row for each run, with the columns in `COLUMNS`."""
    return pl.DataFrame([_describe_run(run) for run in runs], schema=COLUMNS)


def list_changes(run: RunFolder) -> dict[str, Any]:
    """Return the options that differ from the defaults of the run's task and protocol."""
    task, model, train = run.task, run.model, run.train
    kinds = (TASKS[task.name], ModelConfig, TrainConfig)
    defaults = {f.name: f.default for kind in kinds for f in fields(kind)}
    with contextlib.suppress(ValueError):  # sizes that the paper's protocol does not name
        defaults |= get_protocol_defaults(
            train.protocol, task.seq_len, task.vocab_size, model.d_model
        )
    values = {**task.options, **model.to_dict(), **train.to_dict()}
    layers = values.pop("options")
    changed = {
        name: value
        for name, value in values.items()
        if defaults.get(name, MISSING) != value and name not in ("model", "stack")
    }
    return {**changed, **layers}


def name_choices(runs: Iterable[RunFolder]) -> set[str]:
    """Return the names of task, model and each option that a run does not have by default.

    Runs that are alike in these are alike in what follows from them, such as the logit scale, which
    follows from the width.
    """
    always = {"name", "model", "stack", "options"}
    return always.union(*(list_changes(run) for run in runs))


def format_value(value: Any) -> str:
    """Return a value as it is typed for an option."""
    if isinstance(value, Schedule):
        return f"{value.first}:{value.last}"
    if isinstance(value, list | tuple):
        return ",".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_run(run: RunFolder) -> dict[str, Any]:
    try:
        result = run.read_result() or {}
        ending = find_ending(result)
    except RunError:
        result, ending = {}, "unreadable"
    changes = list_changes(run).items()
    return {
        "path": escape_controls(str(run.path)),
        "task": run.task.name,
        "model": run.model.model or run.model.stack,
        "options": " ".join(f"{name}={format_value(value)}" for name, value in changes),
        "seq_len": run.task.seq_len,
        "d_model": run.model.d_model,
        "seed": run.train.seed,
        "accuracy": result.get("accuracy"),
        "chance": run.task.chance,
        "steps": result.get("steps"),
        "seconds": result.get("seconds"),
        "date": _find_date(run).isoformat(sep=" ", timespec="seconds"),
        "stopped": ending,
    }


def _find_date(run: RunFolder) -> datetime:
    """Return when the newest step was recorded; before the first, when the run was made."""
    times = []
    for name in ("metrics.jsonl", "config.json"):
        with contextlib.suppress(OSError, OverflowError, ValueError):  # a year that none can have
            times.append(datetime.fromtimestamp((run.path / name).lstat().st_mtime))
    return times[0] if times else datetime.fromtimestamp(0)


def _list_values(run: RunFolder) -> dict[str, Any]:
    settings = {**run.task.options, **run.model.to_dict(), **run.train.to_dict()}
    return {**settings, **settings.pop("options"), **_describe_run(run)}


def _equals(value: Any, text: str) -> bool:
    """Whether a value is what the text says; numbers may be written in different ways."""
    if format_value(value) == text:
        return True
    with contextlib.suppress(TypeError, ValueError):
        return not isinstance(value, str) and float(value) == float(text)
    return False
