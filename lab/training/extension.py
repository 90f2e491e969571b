"""Extending a run to a later limit of steps.

Unless its schedule is a cosine, the extended run ends with the same bits as a run that had the
later limit from the start. So what the last step did only because it was the last is undone first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lab.files import explain_write_errors, lock
from lab.folder import Folder
from lab.lengthening import ends_stage, list_stages
from lab.training import checkpoint
from lab.training.annealing import Annealing, compute_learning_rate
from lab.training.metrics import MetricsRow
from lab.training.runs import Run
from lab.training.state import TrainingState, enter_next_stage
from tasks.base import Schedule


def check_limit(run: Run, max_steps: int) -> None:
    """Check that a limit is above the steps that a run has taken.

    Raises:
        ValueError: where it is not.
    """
    taken = max(run.list_checkpoints(), default=0)
    if max_steps <= taken:
        raise ValueError(f"max_steps={max_steps}: must be > {taken}, the steps already taken")


def explain_ending(run: Run) -> str:
    """Return why a later limit changes nothing; empty if training would go on.

    Raises:
        RunError: when a file of the run cannot be read.
    """
    result, metrics = run.read_result(), run.read_metrics()
    if result is None or not metrics:
        return ""
    last, stages = metrics[-1], metrics.stages
    if result["stopped"] == "solved" and last == _drop_final_evaluation(
        run, last, stages[-1].steps
    ):
        return f"solved after {result['steps']:,} steps"
    limit, reached = run.train.stage_steps, stages[-1]
    if result["stopped"] == "budget" and last["step"] < run.train.max_steps:
        return f"stopped after stage_steps={limit:,} steps at rows of {reached.seq_len:,} tokens"
    return ""


def describe_effects(run: Run, max_steps: int) -> Iterator[str]:
    """Yield how the extended run differs from one that had the later limit from the start."""
    longer, metrics = replace(run.train, max_steps=max_steps), run.read_metrics()
    taken = metrics[-1]["step"] if metrics else 0
    if run.train.schedule == "cosine" and taken and max_steps != run.train.max_steps:
        was = compute_learning_rate(run.train, taken)
        now = compute_learning_rate(longer, taken + 1)
        yield (
            f"schedule=cosine: the learning rate goes from {was:.3g} to {now:.3g}, onto the curve "
            f"over {max_steps:,} steps; a run with this limit from the start would differ"
        )
    for name, value in run.task.options.items():
        if isinstance(value, Schedule):
            yield (
                f"{name}={value.first}:{value.last}: the schedule still ends after "
                f"{value.rows:,} rows and then stays at {value.last}"
            )


def extend(run: Run, max_steps: int) -> Run:
    """Give a run another limit of steps, and return it; `carry_out` then goes on with it.

    The result so far is kept as result.step-N.json.

    Raises:
        ValueError: for a limit that is not above the steps already taken.
        RunError: when the run cannot be read or written, or is being trained.
    """
    longer = replace(run, train=replace(run.train, max_steps=max_steps))
    with lock(run.path), explain_write_errors(run.path):
        check_limit(run, max_steps)
        state = run.load_state()
        if state.step == run.train.max_steps:
            _undo_last_evaluation(run, state)
        folder = Folder(run.path)
        if folder.exists("result.json"):
            folder.move("result.json", f"result.step-{state.step}.json")
        longer.write_config()
    return longer


def _undo_last_evaluation(run: Run, state: TrainingState) -> None:
    """Make the last step a step like all others: drop its evaluations, or lengthen the rows.

    The checkpoint is changed last: a process that is killed before begins again.
    """
    if state.stage_step == state.step:  # done, by a process that was killed afterwards
        return
    *rows, last = run.read_metrics()
    steps, stages = state.step - state.stage_step, list_stages(run.task, run.train)
    kept = _drop_final_evaluation(run, last, steps)
    is_last = state.stage + 1 == len(stages)
    grows = ends_stage(stages[state.stage], run.train, steps, kept.get("validation_accuracy", 0.0))
    if is_last:
        state.annealing = _repeat_annealing([*rows, kept][state.stage_step :])
    elif grows:
        enter_next_stage(state, stages, run.train)
        if run.list_steps() != [0, state.step]:  # a run without history has only these
            run.keep_weights(state)
    run.write_metrics([*rows, kept])
    checkpoint.rewrite_counters(run.path, state)


def _repeat_annealing(rows: Sequence[MetricsRow]) -> Annealing:
    """Return what schedule "error" follows after these steps, all at the full row length."""
    annealing = Annealing()
    for row in rows:
        if "validation_accuracy" in row:
            annealing.observe(1 - row["validation_accuracy"])
    return annealing


def _drop_final_evaluation(run: Run, row: MetricsRow, stage_steps: int) -> MetricsRow:
    """Return a row of metrics without the evaluations that only the last step of a run has.

    Args:
        run: whose row it is.
        row: the newest.
        stage_steps: steps taken in its stage.
    """
    config = run.train
    if row["step"] % config.eval_every and not _is_last_of_stage(run, row, stage_steps):
        kinds: tuple[str, ...] = ("validation_", "test_")
    elif config.early_stop and row.get("validation_accuracy", 0.0) >= config.solved_at:
        kinds = ()
    else:
        kinds = ("test_",)
    return {name: value for name, value in row.items() if not name.startswith(kinds)}


def _is_last_of_stage(run: Run, row: MetricsRow, stage_steps: int) -> bool:
    """Whether a step was the last that its stage may take, if its rows are not the longest."""
    shorter = row.get("seq_len", run.task.seq_len) < run.task.seq_len
    return shorter and stage_steps == run.train.stage_steps
