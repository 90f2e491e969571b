"""Training in one line: `lab.train("mqar", seq_len=64, stack="AM*2")`."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from lab.api.progress import choose_progress
from lab.api.run import TrainedRun
from lab.api.settings import describe_run
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.training.experiment import carry_out
from tasks import TASKS
from tasks.base import Task
from tasks.bounds import check_kind, find_kind
from tasks.near_names import suggest


def train(
    task: str | Task,
    *,
    stack: str | None = None,
    steps: int | None = None,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    fresh: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train a model on a task with a progress bar, and return the run.

    The same as the command `lab TASK`, with the same defaults: rows grow from short to long, and
    training stops when the task is solved. The run folder is the same, too. A run that has ended is
    not trained again, and an interrupted one goes on.

    Args:
        task: its name, or a task.
        stack: the blocks, such as "AM*2"; None: the task's usual ones.
        steps: stop after this many steps.
        out: the run folder; None: one in runs/, named after the settings.
        options: of layers, such as {"S.d_state": 64}.
        fresh: train anew, and remove the run that the folder holds.
        settings: any other option of the command, such as seq_len=64, d_model=32 or seed=1.

    Raises:
        ValueError: for an unknown name or a value out of its bounds.
        RunError: when the run folder cannot be used.
    """
    if not isinstance(task, str | Task):
        raise ValueError(f"task={task!r}: must be the name of a task, or a task")
    if steps is not None and settings.get("max_steps") is not None:
        raise ValueError("steps and max_steps are the same setting: give one of them")
    name = task if isinstance(task, str) else task.name
    if name not in TASKS:
        raise ValueError(f"task={name!r}: is not a task. {suggest(name, TASKS)}")
    given = {"stack": stack, "max_steps": steps, **settings}
    given = {option: value for option, value in given.items() if value is not None}
    of_task = {f.name for f in fields(TASKS[name]) if f.init}
    if not isinstance(task, str):
        for option in given.keys() & {*of_task, "preset"}:
            raise ValueError(f"{option}: is an option of the task; use task.replace({option}=…)")
        given |= task.options
    _check_names(given, TASKS[name])
    run, runtime = describe_run(
        name, given, None if out is None else Path(out), {"options": dict(options or {})}
    )
    if fresh:
        run.begin_anew()
    with choose_progress(run) as shown:
        carry_out(run, runtime, shown.on_plan, shown.on_row, shown.on_note)
    return TrainedRun(run)


def _check_names(given: Mapping[str, Any], task: type[Task]) -> None:
    """Check the names of settings, and their types; a task checks its own, text apart.

    Raises:
        ValueError: for a name that is not a setting, or a value of another type.
    """
    hints = get_type_hints(task)
    known = dict.fromkeys(["preset"])
    for option in (f.name for f in fields(task) if f.init):
        known[option] = None
        if isinstance(given.get(option), str):  # unlike the command line, this reads no text
            check_kind(option, given[option], find_kind(hints[option]))
    for part in (ModelConfig, TrainConfig, Runtime):
        hints = get_type_hints(part)
        for f in fields(part):
            known[f.name] = None
            if f.name in given:
                check_kind(f.name, given[f.name], hints[f.name])
    for name in given:
        if name not in known:
            raise ValueError(f"{name}: is not a setting. {suggest(name, known)}")
