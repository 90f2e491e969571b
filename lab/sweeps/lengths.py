"""Test accuracy at several row lengths of one run that lengthened its rows."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from lab.models import LanguageModel
from lab.models.evaluation import evaluate
from lab.training.run_folder import RunFolder
from lab.training.runs import Run

VALIDATION_SHARE = 4
"""Test rows per validation row: validation rows only choose among settings."""


def evaluate_lengths(run: Run, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return a run's accuracy on test and validation rows of each length.

    If the stage of that length was followed by another, the weights are those kept at its end;
    otherwise they are the last ones.

    Raises:
        ValueError: for a length that the task has no rows of.
        RunError: when weights cannot be read.
    """
    ends, last = find_stage_ends(run), max(run.list_checkpoints(), default=0)
    rows, found = run.train.test_rows, []
    for length in lengths:
        step = ends.get(length, last)
        ended = (step, length) == (last, run.task.seq_len)
        test, validation = _read_records(run) if ended else ({}, None)
        if test.get("accuracy") is None or validation is None:
            model, fewer = run.load_model(step), max(1, rows // VALIDATION_SHARE)
            if test.get("accuracy") is None:
                test = _evaluate(run, model, length, "test", rows)
            if validation is None:
                validation = _evaluate(run, model, length, "validation", fewer)["accuracy"]
        found.append(_describe(length, step, test, validation))
    return found


def evaluate_last(run: RunFolder) -> dict[str, Any]:
    """Return what `evaluate_lengths` does for the task's own row length, from the run's records.

    Without an accuracy on validation rows if training ended with shorter rows.

    Raises:
        RunError: when the records cannot be read.
    """
    result, validation = _read_records(run)
    return _describe(run.task.seq_len, result["steps"], result, validation)


def _read_records(run: RunFolder) -> tuple[Mapping[str, Any], float | None]:
    """Return a run's result, {} before its end, and its accuracy on validation rows of full length.

    The accuracy is None if the run never got there: validation rows are of the length trained at.
    """
    result, stages = run.read_result(), run.read_metrics().stages
    at_full = bool(stages) and stages[-1].seq_len == run.task.seq_len
    return result or {}, stages[-1].accuracy if at_full else None


def _describe(
    length: int, step: int, test: Mapping[str, Any], validation: float | None
) -> dict[str, Any]:
    return {
        "seq_len": length,
        "step": step,
        "test": test["accuracy"],
        "interval": test.get("interval"),
        "validation": validation,
    }


def _evaluate(
    run: Run, model: LanguageModel, length: int, split: str, rows: int
) -> Mapping[str, Any]:
    task, full = run.task, run.task.seq_len
    return vars(
        evaluate(
            task if length == full else task.resize(length),
            model,
            rows=rows,
            rows_at_once=max(1, run.train.batch_size * full // length),
            seed=run.train.seed,
            split=split,
        )
    )


def find_stage_ends(run: RunFolder) -> dict[int, int]:
    """Return, by row length, the step after which longer rows followed."""
    stages = run.read_metrics().stages
    return {stage.seq_len: longer.began for stage, longer in pairwise(stages)}
