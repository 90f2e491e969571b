"""Test accuracy at several row lengths of one run that lengthened its rows."""

from collections.abc import Sequence
from typing import Any

from lab.evaluation import evaluate
from lab.runs import Run

VALIDATION_SHARE = 4
"""Validation rows are so many times fewer than test rows: they only choose among settings."""


def evaluate_lengths(run: Run, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return a run's accuracy on test and validation rows of each length.

    Where a stage of training with rows of that length was followed by another, the weights are
    those kept at its end; else they are the last ones.

    Raises:
        ValueError: for a length that the task has no rows of.
        RunError: when weights cannot be read.
    """
    ends, last = stage_ends(run), max(run.checkpoints(), default=0)
    found = []
    for length in lengths:
        step = ends.get(length, last)
        task = run.task if length == run.task.seq_len else run.task.at_length(length)
        model = run.weights(step)
        accuracy = {
            split: evaluate(
                task,
                model,
                rows=rows,
                rows_at_once=max(1, run.train.batch_size * run.task.seq_len // length),
                seed=run.train.seed,
                split=split,
            ).accuracy
            for split, rows in (
                ("test", run.train.test_rows),
                ("validation", max(1, run.train.test_rows // VALIDATION_SHARE)),
            )
        }
        found.append({"seq_len": length, "step": step, **accuracy})
    return found


def stage_ends(run: Run) -> dict[int, int]:
    """Return the steps taken when rows of a length were learned and longer ones followed."""
    ends, steps = {}, 0
    parts = run.stages()
    for stage in parts[:-1]:
        steps += stage["steps"]
        ends[stage["seq_len"]] = steps
    return ends
