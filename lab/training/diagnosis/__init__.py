"""Why did a run fail? `diagnose` looks for one kind of failure after the other.

In this order: the model cannot solve the task; rotary positions prevent it; the learning rate is
wrong; it needs more rows; it has not begun to recall. The first with evidence is the diagnosis.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lab.config import ModelConfig
from lab.constructions import rung
from lab.training.diagnosis import rates, rotary
from lab.training.diagnosis.failed_run import Diagnosis, FailedRun, Kind, Look, collect_answers
from lab.training.diagnosis.progress import look_whether_begun, look_whether_under_way
from lab.training.loop import TrainingState
from lab.training.run import Run

__all__ = ["Diagnosis", "FailedRun", "Kind", "Look", "diagnose"]


def diagnose(
    run: Run,
    state: TrainingState,
    *,
    stopped: str,
    accuracy: float | None,
    by_hand: Mapping[str, Any] | None,
) -> Diagnosis | None:
    """Return why a run ended unsolved; None if it is solved, or if the task cannot be solved fully.

    None, too, where answers are numbers: all that it looks at is right or wrong answers.

    This trains codes for some seconds, and copies of the model for at most a tenth of the run's
    steps. The state does not change.

    Args:
        run: the run, whose metrics are complete.
        state: its last.
        stopped: why training ended, as in result.json.
        accuracy: on the test split; None if it diverged.
        by_hand: outcome and reason of the construction; None for a task that has none.
    """
    if (
        run.task.stochastic
        or run.task.vectors
        or stopped == "solved"
        or (accuracy is not None and accuracy >= run.train.solved_at)
    ):
        return None
    failed = FailedRun(run, state, by_hand, stopped)
    seq_len, seen = failed.stage.task.seq_len, {}
    for kind, look in _list_looks(failed):
        found = look()
        if found.claims:
            return Diagnosis(kind, found.says, found.evidence, seq_len)
        seen[kind] = found
    says = "; ".join(found.says for found in seen.values() if found.says)
    evidence = {kind: found.evidence for kind, found in seen.items() if found.evidence}
    return Diagnosis("undecided", says, evidence, seq_len)


def _list_looks(failed: FailedRun) -> Iterator[tuple[Kind, Callable[[], Look]]]:
    """Yield each kind of failure with the function that looks for it, most convincing first."""
    yield "cannot", lambda: _look_for_proof(failed)
    if failed.stopped == "diverged":
        yield "outside the learning-rate window", lambda: rates.look(failed)
        return
    found = collect_answers(failed)
    yield "position forbids", lambda: rotary.look(failed, found.accuracy)
    yield "outside the learning-rate window", lambda: rates.look(failed)
    yield "under way", lambda: look_whether_under_way(failed, found)
    yield "not begun", lambda: look_whether_begun(failed, found)


def _look_for_proof(failed: FailedRun) -> Look:
    """Look for a theorem or a bound on capacity that rules the task out at the stage's length."""
    by_hand = failed.by_hand
    if by_hand is None or by_hand["verdict"] != "cannot":
        return Look(False, "")
    because = by_hand["because"]
    if not failed.full_length:
        model: ModelConfig = failed.run.model
        shorter = rung(failed.stage.task, model, mixer=model.stack, test_rows=1)
        if shorter.outcome != "cannot":
            return Look(
                False, f"no weights solve rows of {failed.run.task.seq_len} tokens: {because}"
            )
        because = shorter.because
    return Look(True, because)
