"""Evaluating a run in settings that it was not trained on."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lab.config import LAB_TOKENS_A_STEP
from lab.files import RunError, lock
from lab.machine.allocation import refuse_more_than_free
from lab.machine.device import choose_device
from lab.machine.memory import DoesNotFitError, give_back_freed_memory
from lab.models.evaluation import check_vocabulary, evaluate, score
from lab.models.language_model import LanguageModel
from lab.models.memory import check_evaluation
from lab.models.user_mixer import check_mixers, convert_mixer_errors
from lab.training.runs import Run
from lab.training.variations import list_evaluations, undo_json, vary_settings
from tasks.base import Task, count_rows

TOKENS = 2**19
"""Maximum number of tokens that a setting is evaluated on, unless the fewest rows have more."""
FEWEST_ROWS = 16


def evaluate_settings(
    run: Run,
    settings: Mapping[str, Sequence[Any]],
    device: str = "auto",
    on_setting: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Evaluate a run's newest weights in other settings, and write the results to result.json.

    A setting that was already evaluated after the same step, or that is named twice, is not
    evaluated again. Each entry has option, value, step, accuracy, interval (95 %), loss in
    nats, rows, scored, chance and seconds; or error, if the model cannot take the setting.

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


def _evaluate_setting(run: Run, task: Task, model: LanguageModel) -> dict[str, Any]:
    began = time.perf_counter()
    error = _find_refusal(run, task, model)
    if error is not None:
        return {"error": error}
    found = evaluate(
        task,
        model,
        rows=count_rows(TOKENS, task.seq_len, fewest=FEWEST_ROWS, most=run.train.test_rows),
        rows_at_once=_count_at_once(task),
        seed=run.train.seed,
    )
    return {**vars(found), "chance": task.chance, "seconds": time.perf_counter() - began}


def check_settings(run: Run, settings: Mapping[str, Sequence[Any]], device: str = "auto") -> None:
    """Check that memory holds the evaluation of a run in other settings, before it is trained.

    On a GPU nothing is checked.

    Raises:
        DoesNotFitError: naming the setting, the bytes, and the longest row that fits.
        ValueError: as `vary_settings`.
    """
    if not settings or choose_device(device).type != "cpu":
        return
    model = run.build().eval()
    for option, value, task in vary_settings(run, settings):
        unfit = _find_unfit(task, model)
        if unfit is not None:
            raise DoesNotFitError(f"eval {option}={value}: {unfit}") from unfit


def _count_at_once(task: Task) -> int:
    return count_rows(LAB_TOKENS_A_STEP, task.seq_len)


@torch.no_grad()
def _find_refusal(run: Run, task: Task, model: LanguageModel) -> str | None:
    """Return why the model cannot take a task's rows, found by trying one; None if it can.

    A learned table may be shorter than the row, say. Errors in making the rows are raised.
    """
    device = next(model.parameters()).device
    row = task.batch(split="test", size=1, seed=run.train.seed, device=device)
    try:
        with refuse_more_than_free(f"a row of {task.seq_len:,} tokens"), check_mixers(model):
            score(model, row, "fp32")
    except ValueError as error:
        return str(error)
    if device.type != "cpu":
        return None
    give_back_freed_memory()  # what training has left
    unfit = _find_unfit(task, model)
    return None if unfit is None else str(unfit)


def _find_unfit(task: Task, model: LanguageModel) -> DoesNotFitError | None:
    """Return why memory does not hold an evaluation; None if it does, or if nothing can be said.

    If the model refuses the task, or a mixer the shorter rows that are measured, nothing is said
    here: the evaluation itself then fails, or works.
    """
    try:
        check_vocabulary(task, model)
        with convert_mixer_errors(model):
            check_evaluation(task, model, _count_at_once(task))
    except DoesNotFitError as error:
        return error
    except ValueError:
        pass
    return None
