"""Settings that a run was not trained on: how far what it learned reaches."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lab.config import LAB_TOKENS_A_STEP
from lab.device import choose_device
from lab.files import lock
from lab.models.evaluation import evaluate, score
from lab.models.language_model import LanguageModel
from lab.models.user_mixer import check_mixers
from lab.training.runs import Run, RunError
from tasks.base import Task, count_rows

TOKENS = 2**19
"""Tokens that a setting is looked at with, at most, but for its fewest rows."""
FEWEST_ROWS = 16


def vary_settings(run: Run, settings: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any, Task]]:
    """Return (option, value, task) for each value of each option, the rest as trained.

    Raises:
        ValueError: for an unknown option, a value out of its bounds, or a setting with tokens that
            the model has no embedding for.
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


def list_default_settings(run: Run) -> dict[str, list[Any]]:
    """Return the settings that the task names for itself, those that this run's options allow.

    The value trained on comes first, where there is one.
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


def evaluate_settings(
    run: Run,
    settings: Mapping[str, Sequence[Any]],
    device: str = "auto",
    told: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Evaluate a run's newest weights at settings, and keep what was found in result.json.

    Settings that were evaluated after the same step are not evaluated again, and one that is named
    twice is evaluated once. Each entry has option, value, step, accuracy, interval (95 %), loss in
    nats, rows, scored, chance and seconds; or error, where the model cannot take the setting.

    Args:
        run: with a result.
        settings: values by option.
        device: where to compute.
        told: called with what is being evaluated.

    Raises:
        RunError: when there is no result or no checkpoint, or either cannot be read or written.
        TextChangedError: when a text that rows are read from has changed.
        ValueError: as `vary_settings`.
    """
    wanted = {
        (option, undo_json(value)): (value, task)
        for option, value, task in vary_settings(run, settings)
    }
    if not run.list_checkpoints():
        raise RunError(f"{run.path}: has no checkpoint to evaluate")
    step = max(run.list_checkpoints())
    with lock(run.path):
        result = run.read_result()
        if result is None:
            raise RunError(f"{run.path}: has no result yet")
        entries = {
            (entry["option"], undo_json(entry["value"])): entry
            for entry in result.get("evaluations", [])
            if entry["step"] == step
        }
        missing = [setting for setting in wanted if setting not in entries]
        if missing:
            model = run.load_state(choose_device(device), step).model
            for option, value in missing:
                given, task = wanted[option, value]
                told(f"{option}={given}")
                about = {"option": option, "value": given, "step": step}
                entries[option, value] = about | _evaluate_setting(run, task, model)
                run.write_result({**result, "evaluations": list(entries.values())})
    return [entries[setting] for setting in wanted]


def undo_json(value: Any) -> Any:
    """Return an option's value as it was before JSON: a mixture's list was a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _evaluate_setting(run: Run, task: Task, model: LanguageModel) -> dict[str, Any]:
    began = time.perf_counter()
    error = _find_refusal(run, task, model)
    if error is not None:
        return {"error": error}
    found = evaluate(
        task,
        model,
        rows=count_rows(TOKENS, task.seq_len, fewest=FEWEST_ROWS, most=run.train.test_rows),
        rows_at_once=count_rows(LAB_TOKENS_A_STEP, task.seq_len),
        seed=run.train.seed,
    )
    return {**vars(found), "chance": task.chance, "seconds": time.perf_counter() - began}


@torch.no_grad()
def _find_refusal(run: Run, task: Task, model: LanguageModel) -> str | None:
    """Return why the model cannot take a task's rows, if one shows that it cannot.

    A learned table is shorter than the row, say. What goes wrong while rows are made is raised.
    """
    device = next(model.parameters()).device
    row = task.batch(split="test", size=1, seed=run.train.seed, device=device)
    try:
        with check_mixers(model):
            score(model, row, "fp32")
    except ValueError as error:
        return str(error)
    return None
