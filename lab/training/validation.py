"""Evaluating a model while it trains: on validation rows, and on the test split at the end."""

from collections.abc import Callable
from dataclasses import replace

from lab.config import TrainConfig
from lab.lengthening import Stage
from lab.machine.clocks import read_clocks
from lab.models import LanguageModel
from lab.models.evaluation import evaluate
from lab.training.row import Row

VALIDATION_STEPS = 4
"""Training steps that have as many rows as a validation; it takes about a twentieth of the time."""


def count_validation_rows(stage: Stage, config: TrainConfig) -> int:
    """Return on how many validation rows a stage is evaluated."""
    return min(config.test_rows, VALIDATION_STEPS * stage.batch_size)


def evaluate_stage(
    row: Row,
    stage: Stage,
    model: LanguageModel,
    config: TrainConfig,
    on_note: Callable[[str], None],
    *,
    last: bool,
) -> Row:
    """Return a row with what the model is worth after its step.

    It is evaluated on validation rows, and on the test split if that may end the run.

    Args:
        row: of the step.
        stage: whose rows are evaluated.
        model: the model.
        config: how it is trained.
        on_note: called with what is done now, before what takes longer than a step.
        last: whether the stage is the last.
    """
    began = read_clocks()
    found = evaluate(
        stage.task,
        model,
        rows=count_validation_rows(stage, config),
        rows_at_once=stage.batch_size,
        seed=config.seed,
        split="validation",
    )
    row = replace(
        row,
        validation_loss=found.loss,
        validation_accuracy=found.accuracy,
        cpu_seconds=(row.cpu_seconds or 0.0) + (read_clocks() - began).cpu,
    )
    promising = config.early_stop and found.accuracy >= config.solved_at
    if not last or not (promising or row.step == config.max_steps):
        return row
    on_note(f"evaluating {config.test_rows:,} test rows")
    test = evaluate(
        stage.task,
        model,
        rows=config.test_rows,
        rows_at_once=config.batch_size,
        seed=config.seed,
    )
    return replace(
        row, test_loss=test.loss, test_accuracy=test.accuracy, test_interval=test.interval
    )
