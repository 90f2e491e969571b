"""Carrying out a run: claim the folder, resume or begin, train, checkpoint, evaluate, conclude."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch

from lab.config import Runtime, TrainConfig
from lab.constructions import BUILT, rung
from lab.device import choose_device
from lab.files import locked
from lab.lengthening import stages
from lab.models.evaluation import evaluate, score
from lab.models.user_mixer import mixers_checked
from lab.suite.audit import audit
from lab.training.diagnosis import diagnose
from lab.training.fit import DivergedError, Row, State, check, fit
from lab.training.history import Pace
from lab.training.runs import Run
from lab.training.step_time import measure
from tasks.base import Task

AUDIT_ROWS = 256
"""Test rows on which shortcuts and oracle are scored."""
SET_BY_HAND_TOKENS, FEWEST_ROWS = 2**15, 16
"""Tokens that weights set by hand are evaluated on, at most, but for the fewest rows."""


@dataclass(frozen=True)
class Plan:
    """What is about to happen.

    Attributes:
        device: where it computes.
        precision: "fp32" or "bf16".
        parameters: how many numbers the model holds.
        first_step: steps already taken by an earlier part of this run.
        seq_lens: row lengths still to be trained at, shortest first.
        slowing: how many times as long a step at the full row length takes as one at the shortest.
    """

    device: torch.device
    precision: str
    parameters: int
    first_step: int
    seq_lens: tuple[int, ...]
    slowing: float


@dataclass(frozen=True)
class Ending:
    """Why training ended: solved, budget, interrupted (by a signal, else for time) or diverged."""

    stopped: str
    by: signal.Signals | None = None


def carry_out(
    run: Run,
    runtime: Runtime,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Train a run to its end, from its newest checkpoint if it has one, and return its result.

    A run that has ended (solved, or out of steps) returns the result it has. SIGINT and SIGTERM
    end it after the step under way, with a checkpoint and `stopped: interrupted`.

    Args:
        run: what to train, and where it is kept.
        runtime: device, minutes, checkpoint interval.
        on_plan: told once, before the first step.
        on_row: told of every step.

    Raises:
        ValueError: when the device asked for is not there.
        RunError: when the folder cannot be used or written.
        DivergedError: with the last good checkpoint kept and `stopped: diverged` written.
    """
    device = choose_device(runtime.device)
    run.claim()
    with locked(run.path):
        done = run.result()
        if done is not None and done["stopped"] in ("solved", "budget"):
            return done
        state = run.load(device)
        run.rewind(state.step)
        parts = stages(run.task, run.train)
        # A run keeps the precision it began in: measured again, another could come out.
        state.precision, slowing = state.precision or run.train.precision, 1.0
        if state.precision == "auto" or len(parts) > 1:
            times = measure(run, parts, device, state.precision)
            state.precision = times.precision
            slowing = times.last / times.first if len(parts) > 1 else 1.0
        plan = Plan(
            device=device,
            precision=state.precision,
            parameters=state.model.parameter_count(),
            first_step=state.step,
            seq_lens=tuple(part.task.seq_len for part in parts[state.stage :]),
            slowing=slowing,
        )
        on_plan(plan)
        with run.recording() as record:

            def told(row: Row) -> None:
                record(row)
                on_row(row)

            try:
                ending = _train(run, state, runtime, state.precision, told)
            except DivergedError as error:
                run.write_result(_result(run, state, Ending("diverged"), plan))
                kept = ", ".join(f"step {step}" for step in run.checkpoints()) or "none yet"
                advice = f"last good checkpoint: {kept}; try a lower --learning-rate"
                raise DivergedError(f"{error}; {advice}") from error
        result = _result(run, state, ending, plan)
        run.write_result(result)
        return result


def try_out(run: Run) -> None:
    """Build a run's model and pass it a row of each stage: what cannot work is said at once.

    Raises:
        ValueError: for a schedule over rows that come again, options that no layer takes, a model
            that memory does not hold, or a mixer that raises or does not map [b t d] to [b t d].
    """
    check(run.task, run.train)
    try:
        model = run.build()
        for stage in reversed(stages(run.task, run.train)):
            batch = stage.task.batch(size=1, seed=run.train.seed)
            # With gradients, as in training: a backend may have none.
            with mixers_checked(model), _at_length(stage.task.seq_len, run.task.seq_len):
                score(model, batch, "fp32")
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        size = f"d_model={run.model.d_model}, vocab_size={run.task.vocab_size}"
        raise ValueError(f"{size}, {run.model.stack}: does not fit in memory") from error


@contextmanager
def _at_length(seq_len: int, full: int) -> Iterator[None]:
    """Say at which row length a mixer fails, where it is not the one that was asked for."""
    try:
        yield
    except ValueError as error:
        if seq_len == full:
            raise
        advice = "--start-len or --no-lengthen starts with longer ones"
        raise ValueError(f"{error}; rows start short: this is at {seq_len}, {advice}") from error


def _train(
    run: Run, state: State, runtime: Runtime, precision: str, told: Callable[[Row], None]
) -> Ending:
    """Take steps, checkpointing, until one of the reasons to end."""
    began = time.monotonic()
    if _solved(run.last_test(), state.step, run.train):
        return Ending("solved")
    pace = Pace()
    # As if it had not been interrupted.
    for before in run.metrics():
        pace.due(before["step"], before["accuracy"])
    with interrupts() as interrupted:
        for row in fit(run.task, state, run.train, precision):
            told(row)
            longer = state.stage_step == row.step
            due = pace.due(row.step, row.accuracy)
            if runtime.history and (due or longer):
                run.keep(state)
            number = interrupted()
            late = (
                runtime.max_minutes is not None
                and time.monotonic() - began >= 60 * runtime.max_minutes
            )
            solved = _solved(vars(row), state.step, run.train)
            if solved or number or late or longer or row.step % runtime.checkpoint_every == 0:
                run.save(state)
            if solved:
                return Ending("solved")
            if number or late:
                return Ending("interrupted", number)
        run.save(state)
    return Ending("budget")


def baselines(task: Task, seed: int) -> dict[str, float]:
    """Return the test accuracy of chance, of each shortcut and of the oracle, in [0, 1]."""
    return {score.name: score.accuracy for score in audit(task, seed=seed, rows=AUDIT_ROWS).scores}


@contextmanager
def interrupts() -> Iterator[Callable[[], signal.Signals | None]]:
    """Yield a question: has SIGINT or SIGTERM come? A second signal acts as it always does."""
    seen: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(signal.Signals(number))
        signal.signal(number, before[seen[-1]])

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: seen[0] if seen else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _solved(row: Mapping[str, Any], step: int, config: TrainConfig) -> bool:
    """Whether the evaluation in a row of metrics, if it is of this step, ends the run."""
    accuracy = row.get("test_accuracy") if row.get("step") == step else None
    return config.early_stop and accuracy is not None and accuracy >= config.solved_at


def _result(run: Run, state: State, ending: Ending, plan: Plan) -> dict[str, Any]:
    seconds, rows = sum(row["seconds"] for row in run.metrics()), state.rows
    loss, right = _scores(run, state, ending)
    by_hand = why = None
    if not ending.by:
        by_hand = _set_by_hand(run)
    if ending.stopped != "interrupted":  # which goes on when the command is given again
        why = diagnose(run, state, stopped=ending.stopped, accuracy=right, by_hand=by_hand)
    return {
        "task": run.task.name,
        "model": run.model.model or run.model.stack,
        "accuracy": right,
        "loss": loss,
        "perplexity": None if loss is None else math.exp(loss),
        f"bits_per_{run.task.unit}": None if loss is None else loss / math.log(2),
        "steps": state.step,
        "rows": rows,
        "seconds": seconds,
        "rows_per_second": rows / seconds if seconds else None,
        "parameters": plan.parameters,
        "seq_len": run.task.seq_len,
        "stages": run.stages(),
        "stopped": ending.stopped,
        "signal": ending.by and ending.by.name,
        "device": str(plan.device),
        "precision": plan.precision,
        "baselines": baselines(run.task, run.train.seed),
        "set_by_hand": by_hand,
        "diagnosis": why and asdict(why),
    }


def _set_by_hand(run: Run) -> dict[str, Any] | None:
    """Return what weights set by hand reach in this run's model; None where no way is built.

    It tells a model that did not learn from one that cannot.
    """
    if run.task.name not in BUILT:
        return None
    rows = max(FEWEST_ROWS, min(AUDIT_ROWS, SET_BY_HAND_TOKENS // run.task.seq_len))
    found = rung(run.task, run.model, mixer=run.model.stack, test_rows=rows, seed=run.train.seed)
    return {"verdict": found.verdict, "accuracy": found.accuracy, "because": found.because}


def _scores(run: Run, state: State, ending: Ending) -> tuple[float | None, float | None]:
    """Return test loss and accuracy: of the last weights, unless a signal asks for haste."""
    last = run.last_test()
    if ending.stopped == "diverged":
        return None, None
    if last.get("step") == state.step or ending.by:
        return last.get("test_loss"), last.get("test_accuracy")
    config = run.train
    found = evaluate(
        run.task,
        state.model,
        rows=config.test_rows,
        rows_at_once=config.batch_size,
        seed=config.seed,
    )
    return found.loss, found.accuracy
