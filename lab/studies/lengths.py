"""Test accuracy at several row lengths of one run that lengthened its rows."""

from collections.abc import Sequence
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
    ends, last, result = (
        find_stage_ends(run),
        max(run.list_checkpoints(), default=0),
        run.read_result() or {},
    )
    found = []
    for length in lengths:
        step = ends.get(length, last)
        known = result.get("accuracy") if (step, length) == (last, run.task.seq_len) else None
        model, rows = run.load_model(step), run.train.test_rows
        test = _accuracy(run, model, length, "test", rows) if known is None else known
        validation = _accuracy(run, model, length, "validation", max(1, rows // VALIDATION_SHARE))
        found.append({"seq_len": length, "step": step, "test": test, "validation": validation})
    return found


def _accuracy(run: Run, model: LanguageModel, length: int, split: str, rows: int) -> float:
    task, full = run.task, run.task.seq_len
    return evaluate(
        task if length == full else task.resize(length),
        model,
        rows=rows,
        rows_at_once=max(1, run.train.batch_size * full // length),
        seed=run.train.seed,
        split=split,
    ).accuracy


def find_stage_ends(run: Run) -> dict[int, int]:
    """Return, by row length, the step after which longer rows followed."""
    stages = run.read_metrics().stages
    return {stage.seq_len: longer.began for stage, longer in pairwise(stages)}
