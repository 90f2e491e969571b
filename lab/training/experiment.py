"""Carrying out a run: claim its folder, begin or resume, train, keep what comes, conclude."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch

from lab.config import AUDIT_ROWS, Runtime, TrainConfig
from lab.constructions import BUILT, rung
from lab.files import RunError
from lab.lengthening import list_stages
from lab.machine import (
    DoesNotFitError,
    check_fits,
    choose_device,
    describe_device,
    explain_lack_of_memory,
    use_threads,
)
from lab.models.anatomy import StateSize, measure_state
from lab.models.evaluation import evaluate, score
from lab.models.user_mixer import check_mixers
from lab.suite.audit import audit
from lab.training.certificate import certify_layers, describe_certificate, write_certificate
from lab.training.checkpoint import WeightsSchedule, keep_weights, save_checkpoint
from lab.training.diagnosis import diagnose
from lab.training.loggers import open_logger
from lab.training.loop import DivergedError, Row, TrainingState, check, fit
from lab.training.run import Run
from lab.training.speed import Pace, StepTime, list_thread_counts, measure_choices
from tasks.base import Task, count_rows

COPIES = 4
"""Numbers per parameter: itself, its gradient, and at most two moments."""
HIDDEN = 4
"""Numbers of a token in the largest activation, as a multiple of the width, at least."""
CONSTRUCTION_TOKENS, FEWEST_ROWS = 2**15, 16
"""Maximum number of tokens to evaluate a construction on, unless the fewest rows have more."""
FindInterrupt = Callable[[], signal.Signals | None]


@dataclass(frozen=True)
class Plan:
    """What training is about to do.

    Attributes:
        device: where it computes.
        best: the precision and the threads that it computes with, and their measured times.
        others: what else was measured, the fastest first.
        parameters: how many numbers the model holds.
        state_size: what decoding keeps of a row of the task's own length.
        first_step: steps already taken by an earlier part of this run.
        seq_lens: row lengths still to be trained at, shortest first.
        certified: what the laws say about the layers, in one line; "" if they were not asked.
    """

    device: torch.device
    best: StepTime
    others: list[StepTime]
    parameters: int
    state_size: StateSize
    first_step: int
    seq_lens: tuple[int, ...]
    certified: str = ""


@dataclass(frozen=True)
class Ending:
    """Why training ended.

    Attributes:
        stopped: "solved", "budget" (all steps taken), "interrupted" or "diverged".
        by: the signal that interrupted it; None where the minutes were up.
    """

    stopped: str
    by: signal.Signals | None = None


def carry_out(
    run: Run,
    runtime: Runtime,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_row: Callable[[Row], None] = lambda row: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train a run to its end, from its newest checkpoint if it has one, and return its result.

    A run that has ended (solved, or out of steps) returns the result it has. SIGINT and SIGTERM
    end it after the current step, with a checkpoint and `stopped: interrupted`.

    Args:
        run: what to train, and where it is kept.
        runtime: device, minutes, checkpoint interval, logger.
        on_plan: called once, before the first step.
        on_row: called after every step.
        on_note: called with what is done now, before what takes longer than a step.

    Raises:
        ValueError: when the device asked for is not there.
        RunError: when the folder cannot be used or written, or memory does not suffice.
        UnlawfulError: when a layer breaks a law that training relies on, before the first step.
        DivergedError: with the last good checkpoint kept and `stopped: diverged` written.
    """
    device = choose_device(runtime.device)
    with run.occupy() as done, _explain_full_memory(run):
        if done is not None:
            return done
        run = run.recall_precision()
        state = run.load_state(device)
        run.rewind(state.step)
        certified = "" if state.step else _certify(run, runtime.certify, device, on_note)
        # A run keeps the precision that it began with, as one of its settings.
        counts, known = list_thread_counts(device), runtime.threads or state.threads
        times = measure_choices(
            run, device, state.precision or run.train.precision, [known] if known else counts
        )
        state.precision, state.threads = times[0].precision, times[0].threads
        if run.train.precision == "auto":
            run = run.with_precision(state.precision)
            run.write_config()
        stages = list_stages(run.task, run.train)[state.stage :]
        size = measure_state(state.model, run.task.seq_len)
        on_plan(
            Plan(
                device=device,
                best=times[0],
                others=times[1:],
                parameters=state.model.parameter_count(),
                state_size=size,
                first_step=state.step,
                seq_lens=tuple(stage.task.seq_len for stage in stages),
                certified=certified,
            )
        )
        try:
            with use_threads(state.threads):
                ending = _train(run, state, runtime, counts, on_row, on_note)
        except DivergedError as error:
            run.write_result(summarize(run, state, Ending("diverged"), device, size))
            kept = ", ".join(f"step {step}" for step in run.list_checkpoints()) or "none yet"
            raise DivergedError(
                f"{error}; last good checkpoint: {kept}; try a lower --learning-rate"
            ) from error
        if not ending.by:
            on_note("evaluating shortcuts, and weights set by hand")
        result = summarize(run, state, ending, device, size)
        run.write_result(result)
        return result


@contextmanager
def _explain_full_memory(run: Run) -> Iterator[None]:
    """Raise a `RunError` that names the run where memory does not suffice to carry it out."""
    try:
        with explain_lack_of_memory("training"):
            yield
    except DoesNotFitError as error:
        raise RunError(f"{run.path}: {error}") from error


def _train(
    run: Run,
    state: TrainingState,
    runtime: Runtime,
    counts: Sequence[int],
    on_row: Callable[[Row], None],
    on_note: Callable[[str], None],
) -> Ending:
    """Take steps, and keep rows, weights and checkpoints, until there is a reason to end."""
    metrics, schedule, pace = run.read_metrics(), WeightsSchedule(), Pace()
    if is_solved(metrics.last_test, state.step, run.train):
        return Ending("solved")
    for before in metrics:  # as if it had not been interrupted
        schedule.update(before["step"], before["accuracy"])
    end = math.inf if runtime.max_minutes is None else time.monotonic() + 60 * runtime.max_minutes
    with (
        catch_interrupts() as find_interrupt,
        run.record_rows() as record,
        open_logger(runtime.log, run, state.step) as log,
    ):
        for row in fit(run.task, state, run.train, on_note):
            for tell in (record, log, on_row):
                tell(row)
            lengthened = state.stage_step == row.step
            if (schedule.update(row.step, row.accuracy) or lengthened) and runtime.history:
                keep_weights(run, state.step, state.model)
            solved, interrupt = is_solved(vars(row), state.step, run.train), find_interrupt()
            if solved or interrupt or time.monotonic() >= end:
                save_checkpoint(run, state)
                return Ending("solved") if solved else Ending("interrupted", interrupt)
            if lengthened or row.step % runtime.checkpoint_every == 0:
                save_checkpoint(run, state)
            if runtime.threads is None and pace.is_slow(row):
                device = next(state.model.parameters()).device
                best, *_ = measure_choices(run, device, state.precision, counts)
                state.threads = best.threads
                torch.set_num_threads(state.threads)
    save_checkpoint(run, state)
    return Ending("budget")


def is_solved(row: Mapping[str, Any], step: int, config: TrainConfig) -> bool:
    """Whether the evaluation in a row of metrics, if it is of this step, ends the run."""
    accuracy = row.get("test_accuracy") if row.get("step") == step else None
    return config.early_stop and accuracy is not None and accuracy >= config.solved_at


def _certify(
    run: Run, asked: bool | None, device: torch.device, on_note: Callable[[str], None]
) -> str:
    """Certify all layers if asked, by default a user's alone; return the result in one line.

    Raises:
        UnlawfulError: when a layer breaks a law that training relies on.
    """
    if not (run.model.model is not None if asked is None else asked):
        return ""
    on_note("certifying the layers")
    lengths = [stage.task.seq_len for stage in list_stages(run.task, run.train)]
    certificate = certify_layers(run.build(), lengths, device, every=asked is True)
    write_certificate(run.path, certificate)
    return f"{describe_certificate(certificate)} ({certificate['cpu_seconds']:.1f} s)"


@contextmanager
def catch_interrupts() -> Iterator[FindInterrupt]:
    """Hold back SIGINT and SIGTERM; yields a function that returns the one that came, if any.

    A second signal acts as it would without this.
    """
    caught: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number))
        signal.signal(number, before[caught[-1]])

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def try_out(run: Run, device: torch.device | None = None) -> None:
    """Build a run's model and pass it a row of each stage, so that errors show before training.

    Args:
        run: what to train.
        device: where it will be trained; None: the CPU.

    Raises:
        ValueError: for a schedule over repeated rows, options that no layer takes, sizes that
            memory does not hold, or a mixer that raises or does not map [b t d] to [b t d].
    """
    check(run.task, run.train)
    if device is None or device.type == "cpu":
        width, tokens = run.model.d_model, run.train.batch_size * run.task.seq_len
        sizes = run.task.sizes
        said = ", ".join(f"{name}={size}" for name, size in sizes.items())
        what = f"d_model={width}, {said}, {run.model.stack}"
        check_fits(f"{what}: training", COPIES * (sum(sizes.values()) + width) * width)
        what = f"batch_size={run.train.batch_size}, seq_len={run.task.seq_len}"
        check_fits(f"{what}: a step", HIDDEN * width * tokens)
    model = run.build()
    for stage in reversed(list_stages(run.task, run.train)):
        batch = stage.task.batch(size=1, seed=run.train.seed)
        length = stage.task.seq_len
        # With gradients, as in training: a backend may have none.
        try:
            with check_mixers(model), explain_lack_of_memory(f"a row of {length:,} tokens"):
                score(model, batch, "fp32")
        except ValueError as error:
            if length == run.task.seq_len:
                raise
            advice = "--start-len or --no-lengthen starts with longer ones"
            raise ValueError(f"{error}; rows start short: this is at {length}, {advice}") from error


def summarize(
    run: Run, state: TrainingState, ending: Ending, device: torch.device, size: StateSize
) -> dict[str, Any]:
    """Return the content of result.json, ready for JSON.

    After a signal the model is not evaluated again, no construction is tried, and nothing is
    diagnosed: the user waits.
    """
    metrics = run.read_metrics()
    seconds = sum(row["seconds"] for row in metrics)
    loss, accuracy, interval = _score(run, state, ending, metrics.last_test)
    bits: dict[str, float | None] = {}
    if not run.task.vectors:
        bits[f"bits_per_{run.task.unit}"] = None if loss is None else loss / math.log(2)
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
        "perplexity": None if loss is None or run.task.vectors else math.exp(loss),
        **bits,
        "steps": state.step,
        "rows": state.rows,
        "seconds": seconds,
        "rows_per_second": state.rows / seconds if seconds else None,
        "cpu_seconds": sum(row["cpu_seconds"] for row in metrics),
        "parameters": state.model.parameter_count(),
        "state_bytes": size.bytes,
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
    run: Run, state: TrainingState, ending: Ending, last: Mapping[str, Any]
) -> tuple[float | None, float | None, list[float] | None]:
    """Return test loss, accuracy and its interval: of the last weights, or, after a signal, known.

    Args:
        run: the run.
        state: its last.
        ending: why it ended.
        last: the newest row of metrics with a test.
    """
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
    return found.loss, found.accuracy, list(found.interval)
