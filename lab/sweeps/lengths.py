"""Test accuracy at several row lengths of one run that lengthened its rows."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from lab.models import LanguageModel
from lab.models.evaluation import evaluate
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
    result = run.read_result() or {}
    found = []
    for length in lengths:
        step = ends.get(length, last)
        model, rows = run.load_model(step), run.train.test_rows
        known = (step, length) == (last, run.task.seq_len) and result.get("accuracy") is not None
        test = result if known else _evaluate(run, model, length, "test", rows)
        validation = _evaluate(run, model, length, "validation", max(1, rows // VALIDATION_SHARE))
        found.append(_describe(length, step, test, validation["accuracy"]))
    return found


def evaluate_last(run: Run) -> dict[str, Any]:
    """Return what `evaluate_lengths` does for the task's own row length, from the run's records.

    Raises:
        RunError: when the records cannot be read.
    """
    result = run.read_result() or {}
    evaluations = run.read_metrics().evaluations
    validation = evaluations[-1]["accuracy"] if evaluations else None
    return _describe(run.task.seq_len, result["steps"], result, validation)


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


def find_stage_ends(run: Run) -> dict[int, int]:
    """Return, by row length, the step after which longer rows followed."""
    stages = run.read_metrics().stages
    return {stage.seq_len: longer.began for stage, longer in pairwise(stages)}
