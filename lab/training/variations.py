"""The settings that a run can be evaluated at, and those that it was: read without torch."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from lab.training.run_folder import RunFolder
from tasks.base import Task


def vary_settings(
    run: RunFolder, settings: Mapping[str, Sequence[Any]]
) -> list[tuple[str, Any, Task]]:
    """Return (option, value, task) for each value of each option, the rest as trained.

    Raises:
        ValueError: for an unknown option, a value out of bounds, or a setting with more tokens
            than the model has embeddings.
    """
    found = []
    for option, values in settings.items():
        for value in values:
            task = run.task.replace(**{option: value})
            if task.vocab_size > run.task.vocab_size:
                raise ValueError(
                    f"eval {option}={value}: has {task.vocab_size} tokens, the model "
                    f"{run.task.vocab_size}"
                )
            found.append((option, value, task))
    return found


def list_default_settings(run: RunFolder) -> dict[str, list[Any]]:
    """Return the settings that the task suggests, as far as this run's options allow them.

    The value trained on comes first, if there is a single one.
    """
    allowed: dict[str, list[Any]] = {}
    for option, values in run.task.evaluations.items():
        trained = run.task.options[option]
        own = [trained] if isinstance(trained, int | float) else []
        for value in [*own, *(value for value in values if value != trained)]:
            with contextlib.suppress(ValueError):
                vary_settings(run, {option: [value]})
                allowed.setdefault(option, []).append(value)
    return allowed


def list_evaluations(result: Mapping[str, Any], step: int) -> dict[tuple[str, Any], dict[str, Any]]:
    """Return the evaluations that result.json has of the weights of a step, by option and value."""
    return {
        (entry["option"], undo_json(entry["value"])): entry
        for entry in result.get("evaluations", [])
        if entry["step"] == step
    }


def undo_json(value: Any) -> Any:
    """Return an option's value as it was before JSON made a list of a mixture's tuple."""
    return tuple(value) if isinstance(value, list) else value
