"""The result of a run: test accuracy, baselines, what a construction reaches, a diagnosis."""

import math
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lab.config import AUDIT_ROWS
from lab.constructions import BUILT, rung
from lab.machine.device import describe_device
from lab.models.evaluation import evaluate
from lab.suite.audit import audit
from lab.training.diagnosis import diagnose
from lab.training.metrics import Metrics
from lab.training.runs import Run
from lab.training.state import TrainingState
from tasks.base import Task, count_rows

CONSTRUCTION_TOKENS, FEWEST_ROWS = 2**15, 16
"""Maximum number of tokens to evaluate a construction on, unless the fewest rows have more."""


@dataclass(frozen=True)
class Ending:
    """Why training ended.

    Attributes:
        stopped: "solved", "budget" (all steps taken), "interrupted" or "diverged".
        by: the signal that interrupted it; None where the minutes were up.
    """

    stopped: str
    by: signal.Signals | None = None


def summarize(
    run: Run, state: TrainingState, ending: Ending, device: torch.device
) -> dict[str, Any]:
    """Return the content of result.json, ready for JSON.

    After a signal the model is not evaluated again, no construction is tried, and nothing is
    diagnosed: the user waits.
    """
    metrics = run.read_metrics()
    seconds = sum(row["seconds"] for row in metrics)
    loss, accuracy, interval = _score(run, state, ending, metrics)
    by_hand = why = None
    if not ending.by:
        by_hand = _try_construction(run)
        why = diagnose(run, state, stopped=ending.stopped, accuracy=accuracy, by_hand=by_hand)
    return {
        "task": run.task.name,
        "model": run.model.model or run.model.stack,
        "accuracy": accuracy,
        "interval": interval,
        "loss": loss,
        "perplexity": None if loss is None else math.exp(loss),
        f"bits_per_{run.task.unit}": None if loss is None else loss / math.log(2),
        "steps": state.step,
        "rows": state.rows,
        "seconds": seconds,
        "rows_per_second": state.rows / seconds if seconds else None,
        "cpu_seconds": metrics.cpu_seconds,
        "parameters": state.model.parameter_count(),
        "seq_len": run.task.seq_len,
        "stages": [
            {
                "seq_len": stage.seq_len,
                "steps": stage.steps,
                "seconds": stage.seconds,
                "accuracy": stage.accuracy,
            }
            for stage in metrics.stages
        ],
        "stopped": ending.stopped,
        "signal": ending.by and ending.by.name,
        "device": str(device),
        "machine": describe_device(device),
        "precision": state.precision,
        "baselines": score_baselines(run.task, run.train.seed),
        "set_by_hand": by_hand,
        "diagnosis": why and asdict(why),
    }


def score_baselines(task: Task, seed: int) -> dict[str, float]:
    """Return the test accuracy in [0, 1] of chance, of each shortcut and of the oracle."""
    return {score.name: score.accuracy for score in audit(task, seed=seed, rows=AUDIT_ROWS).scores}


def _try_construction(run: Run) -> dict[str, Any] | None:
    """Return what a construction reaches in this run's model; None for a task that has none.

    It tells a model that did not learn from one that cannot.
    """
    if run.task.name not in BUILT:
        return None
    rows = count_rows(CONSTRUCTION_TOKENS, run.task.seq_len, fewest=FEWEST_ROWS, most=AUDIT_ROWS)
    found = rung(run.task, run.model, mixer=run.model.stack, test_rows=rows, seed=run.train.seed)
    return {"verdict": found.outcome, "accuracy": found.accuracy, "because": found.because}


def _score(
    run: Run, state: TrainingState, ending: Ending, metrics: Metrics
) -> tuple[float | None, float | None, Sequence[float] | None]:
    """Return test loss, accuracy and its interval: of the last weights, or, after a signal, known.

    An interval is missing where an older version of the lab tested the weights.
    """
    last = metrics.last_test
    if ending.stopped == "diverged":
        return None, None, None
    if last.get("step") == state.step or ending.by:
        return last.get("test_loss"), last.get("test_accuracy"), last.get("test_interval")
    config = run.train
    found = evaluate(
        run.task,
        state.model,
        rows=config.test_rows,
        rows_at_once=config.batch_size,
        seed=config.seed,
    )
    return found.loss, found.accuracy, found.interval
