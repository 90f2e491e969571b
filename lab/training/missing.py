"""Check that nothing that a run saved is missing: training would silently go on without it."""

from lab.files import RunError
from lab.training.runs import Run
from lab.training.state import TrainingState

ADVICE = "put it back, or remove checkpoint/, metrics.jsonl and result.json to begin again"


def check_whole(run: Run, state: TrainingState) -> None:
    """Check that a run has all that was saved up to the step from which it goes on.

    Args:
        run: the run.
        state: what was loaded.

    Raises:
        RunError: when the checkpoints are gone, or the metrics do not reach up to the newest.
    """
    metrics = run.read_metrics()
    if state.step:
        last = metrics[-1]["step"] if metrics else 0
        if last < state.step:
            raise RunError(
                f"{run.path}: metrics.jsonl ends at step {last}, the checkpoint is of step "
                f"{state.step}; {ADVICE}"
            )
        return
    result = run.read_result()
    steps = result["steps"] if result and result["stopped"] == "interrupted" else 0
    if metrics.checkpoint or steps:
        raise RunError(
            f"{run.path}: the checkpoint of step {metrics.checkpoint or steps} is gone; {ADVICE}"
        )
