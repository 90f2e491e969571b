"""All runs below a folder, a table of them, and which of them have given settings."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import polars as pl

from lab.config import ModelConfig, TrainConfig, get_protocol_defaults
from lab.files import RunError, escape_controls
from lab.training.records import ENDINGS, find_ending, name_ending, read_ending
from lab.training.run import Run
from tasks import TASKS
from tasks.base import Schedule
from tasks.near_names import list_choices, suggest

COLUMNS = {
    "path": pl.String,
    "task": pl.String,
    "stack": pl.String,
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
"""`model` is the class of the user's own mixer. `options` are those that differ from the defaults.
`date` is the local time of the last step."""


NO_RESULT = ("unfinished", "unreadable")
"""Endings of runs whose result is not there, or cannot be read."""
MOST_VALUES = 10
"""Values of an option that a message lists."""


def find_runs(
    root: Path,
    on_unreadable: Callable[[str], None] = lambda reason: None,
    *,
    trust: bool = False,
) -> list[Run]:
    """Return the readable runs at or below a folder, by path.

    Args:
        root: the folder.
        on_unreadable: called with the reason why a run is left out.
        trust: read the texts that runs name.
    """
    runs = []
    for file in sorted(root.rglob("config.json")):
        try:
            runs.append(Run.open(file.parent, trust=trust))
        except RunError as error:
            on_unreadable(str(error))
    return runs


def select_runs(runs: Sequence[Run], chosen: Sequence[str]) -> list[Run]:
    """Return the runs that have the given values, each "NAME=VALUE".

    A run must have one of the values given for each name. A name is a column of the table or an
    option of `lab TASK`, including options of layers such as S.d_state. How a run stopped is given
    in the words of `name_ending`; the keys that tables of data have mean the same.

    Raises:
        ValueError: for text of another form, a name that is neither, or a value that no run can
            have because it is none of the name's choices.
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
        if not equals:
            raise ValueError(f"only={text}: must be NAME=VALUE, such as stopped=solved")
        if not (name in known or of_layer):
            raise ValueError(
                f"only={text}: {name} is not an option or column. {suggest(name, known)}"
            )
        choices = _list_choices(name, runs)
        if name == "stopped" and read_ending(value) in (*ENDINGS, *NO_RESULT):
            value = name_ending(read_ending(value))
        if choices and value not in choices:
            raise ValueError(f"only={text}: {name} {list_choices(value, choices)}")
        wanted.setdefault(name, []).append(value)
    return [
        run
        for run in runs
        if all(
            any(_equals(values[run.path].get(name), text) for text in texts)
            for name, texts in wanted.items()
        )
    ]


def explain_none(runs: Sequence[Run], chosen: Sequence[str]) -> str:
    """Say which values runs have, for each "NAME=VALUE" that none of them has; "" if there is none.

    Raises:
        ValueError: as `select_runs`.
    """
    said = []
    for text in chosen:
        if not select_runs(runs, [text]):
            name = text.partition("=")[0].replace("-", "_")
            values = (_list_values(run).get(name) for run in runs)
            found = list(
                dict.fromkeys(format_value(value) for value in values if value is not None)
            )
            more = ", …" if len(found) > MOST_VALUES else ""
            said.append(f"{name} is {', '.join(found[:MOST_VALUES])}{more}")
    return "; ".join(said)


def tabulate(runs: Sequence[Run]) -> pl.DataFrame:
    """Return a row for each run, with the columns in `COLUMNS`."""
    return pl.DataFrame([_describe_run(run) for run in runs], schema=COLUMNS)


def list_changes(run: Run) -> dict[str, Any]:
    """Return the options that differ from the defaults of the run's task and protocol."""
    task, model, train = run.task, run.model, run.train
    kinds = (TASKS[task.name], ModelConfig, TrainConfig)
    defaults = {f.name: f.default for kind in kinds for f in fields(kind)}
    with contextlib.suppress(ValueError):  # sizes that the paper's protocol does not name
        defaults |= get_protocol_defaults(
            train.protocol, task.seq_len, task.vocab_size, model.d_model
        )
    # fp32 is what "auto" chooses unless bf16 is faster.
    defaults["precision"] = "fp32"
    if model.model is not None:
        defaults["n_heads"] = None
    values = {**task.options, **model.to_dict(), **train.to_dict()}
    layers = values.pop("options")
    changed = {
        name: value
        for name, value in values.items()
        if defaults.get(name, MISSING) != value and name not in ("model", "stack")
    }
    return {**changed, **layers}


def name_choices(runs: Iterable[Run]) -> set[str]:
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


def _describe_run(run: Run) -> dict[str, Any]:
    try:
        result = run.read_result() or {}
        ending = find_ending(result)
    except RunError:
        result, ending = {}, "unreadable"
    changes = list_changes(run).items()
    return {
        "path": escape_controls(str(run.path)),
        "task": run.task.name,
        "stack": run.model.stack,
        "model": run.model.model,
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


def _find_date(run: Run) -> datetime:
    """Return when the newest step was recorded; before the first, when the run was made."""
    times = []
    for name in ("metrics.jsonl", "config.json"):
        with contextlib.suppress(OSError, OverflowError, ValueError):  # a year that none can have
            times.append(datetime.fromtimestamp((run.path / name).lstat().st_mtime))
    return times[0] if times else datetime.fromtimestamp(0)


def _list_values(run: Run) -> dict[str, Any]:
    settings = {**run.task.options, **run.model.to_dict(), **run.train.to_dict()}
    described = _describe_run(run)
    ending = name_ending(described["stopped"])
    return {**settings, **settings.pop("options"), **described, "stopped": ending}


def _list_choices(name: str, runs: Sequence[Run]) -> list[str]:
    """Return all values that an option or a column may have; empty where they are not named ones.

    A mixture of named ones may be the value of a task's option; those of the runs are returned too.
    """
    if name == "stopped":
        return [*ENDINGS.values(), *NO_RESULT]
    if name == "task":
        return [*TASKS]
    kinds = [ModelConfig, TrainConfig, *{TASKS[run.task.name] for run in runs}]
    hints = [get_type_hints(kind).get(name) for kind in kinds]
    named = [value for hint in hints if get_origin(hint) is Literal for value in get_args(hint)]
    if not named:
        return []
    return list(dict.fromkeys([*named, *(format_value(_list_values(r).get(name)) for r in runs)]))


def _equals(value: Any, text: str) -> bool:
    """Whether a value is what the text says; numbers may be written in different ways."""
    if format_value(value) == text:
        return True
    with contextlib.suppress(TypeError, ValueError):
        return not isinstance(value, str) and float(value) == float(text)
    return False
