"""Evaluating a run in settings that it was not trained on."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.config import LAB_TOKENS_A_STEP
from lab.files import RunError, lock
from lab.training.run import Run
from tasks.base import Task, count_rows

if TYPE_CHECKING:
    from lab.models import LanguageModel

TOKENS = 2**19
"""Maximum number of tokens that a setting is evaluated on, unless the fewest rows have more."""
FEWEST_ROWS = 16


def vary_settings(run: Run, settings: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any, Task]]:
    """Return (option, value, task) for each value of each option, the rest as trained.

    Raises:
        ValueError: for an unknown option, a value out of bounds, or a setting with more tokens
            than the model has embeddings, or with wider or narrower vectors.
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
            if task.vectors and task.sizes != run.task.sizes:
                raise ValueError(
                    f"eval {option}={value}: has vectors of {task.sizes['d_input']} numbers, the "
                    f"model {run.task.sizes['d_input']}"
                )
            found.append((option, value, task))
    return found


def list_default_settings(run: Run) -> dict[str, list[Any]]:
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


def evaluate_settings(
    run: Run,
    settings: Mapping[str, Sequence[Any]],
    device: str = "auto",
    on_setting: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Evaluate a run's newest weights in other settings, and write the results to result.json.

    A setting that was already evaluated after the same step, or that is named twice, is not
    evaluated again. Each entry has option, value, step, accuracy, interval (95 %), loss, rows,
    scored, chance and seconds; or error, if the model cannot take the setting.

    Args:
        run: with a result.
        settings: values by option.
        device: where to compute.
        on_setting: called with the name of each setting before its evaluation.

    Raises:
        RunError: when there is no result or no checkpoint, or either cannot be read or written.
        TextChangedError: when a text that rows are read from has changed.
        ValueError: as `vary_settings`.
    """
    from lab.machine import choose_device

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
        entries = list_evaluations(result, step)
        missing = [setting for setting in wanted if setting not in entries]
        if missing:
            model = run.load_state(choose_device(device), step).model
            for option, value in missing:
                given, task = wanted[option, value]
                on_setting(f"{option}={given}")
                about = {"option": option, "value": given, "step": step}
                entries[option, value] = about | _evaluate_setting(run, task, model)
                run.write_result({**result, "evaluations": list(entries.values())})
    return [entries[setting] for setting in wanted]


def _evaluate_setting(run: Run, task: Task, model: "LanguageModel") -> dict[str, Any]:
    """Return how the model does on a task's rows, or why it cannot take them.

    That is found by trying one: a learned table may be shorter than the row, say. Errors in making
    the rows are raised.
    """
    import torch

    from lab.machine import DoesNotFitError, explain_lack_of_memory
    from lab.models.evaluation import evaluate, score
    from lab.models.user_mixer import check_mixers

    began, device = time.perf_counter(), next(model.parameters()).device
    row = task.batch(split="test", size=1, seed=run.train.seed, device=device)
    rows = f"rows of {task.seq_len:,} tokens"
    try:
        with explain_lack_of_memory(rows), check_mixers(model), torch.no_grad():
            score(model, row, "fp32")
    except ValueError as error:
        return {"error": str(error)}
    try:
        with explain_lack_of_memory(rows):
            found = evaluate(
                task,
                model,
                rows=count_rows(TOKENS, task.seq_len, fewest=FEWEST_ROWS, most=run.train.test_rows),
                rows_at_once=count_rows(LAB_TOKENS_A_STEP, task.seq_len),
                seed=run.train.seed,
            )
    except DoesNotFitError as error:
        return {"error": str(error)}
    return {**vars(found), "chance": task.chance, "seconds": time.perf_counter() - began}
