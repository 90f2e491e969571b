"""Running an experiment: claim the folder, resume or begin, train, checkpoint, conclude."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lab.config import Runtime, TrainConfig
from lab.files import lock
from lab.lengthening import list_stages
from lab.machine.device import choose_device
from lab.models.evaluation import score
from lab.models.room import refuse_weights
from lab.models.user_mixer import check_mixers
from lab.training.certificate import describe_certificate, write_certificate
from lab.training.conclusion import Ending, summarize
from lab.training.fit import DivergedError, Row, TrainingState, check, fit
from lab.training.footprint import COPIES, TOKENS, check_step
from lab.training.history import Pace
from lab.training.loggers import open_logger
from lab.training.runs import Run
from lab.training.signals import catch_interrupts
from lab.training.step_time import StepTime, measure, use_threads


@dataclass(frozen=True)
class Plan:
    """What training is about to do.

    Attributes:
        device: where it computes.
        best: the precision and the threads that it computes with, and their measured times.
        others: what else was measured, the fastest first.
        parameters: how many numbers the model holds.
        first_step: steps already taken by an earlier part of this run.
        seq_lens: row lengths still to be trained at, shortest first.
        slowing: how many times as long a step at the full row length takes as one at the shortest.
        certified: what the laws say about the layers, in one line; "" if they were not asked.
    """

    device: torch.device
    best: StepTime
    others: list[StepTime]
    parameters: int
    first_step: int
    seq_lens: tuple[int, ...]
    slowing: float
    certified: str = ""


def carry_out(
    run: Run,
    runtime: Runtime,
    on_plan: Callable[[Plan], None] | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train a run to its end, from its newest checkpoint if it has one, and return its result.

    A run that has ended (solved, or out of steps) returns the result it has. SIGINT and SIGTERM
    end it after the current step, with a checkpoint and `stopped: interrupted`.

    Args:
        run: what to train, and where it is kept.
        runtime: device, minutes, checkpoint interval, logger.
        on_plan: called once, before the first step; None where nobody asks for times.
        on_row: called after every step.
        on_note: called with what is done now, before what takes longer than a step.

    Raises:
        ValueError: when the device asked for is not there.
        RunError: when the folder cannot be used or written.
        UnlawfulError: when a layer breaks a law that training relies on, before the first step.
        DivergedError: with the last good checkpoint kept and `stopped: diverged` written.
    """
    device = choose_device(runtime.device)
    run.claim()
    with lock(run.path):
        done = run.read_result()
        if done is not None and done["stopped"] in ("solved", "budget"):
            return done
        state = run.load_state(device)
        run.rewind(state.step)
        certified = _certify(run, runtime, device, on_note) if state.step == 0 else ""
        plan = _plan(run, state, device, runtime.threads, timed=on_plan is not None)
        if on_plan is not None:
            on_plan(replace(plan, certified=certified))
        with (
            run.record_rows() as record,
            open_logger(runtime.log, run, state.step) as log,
            use_threads(state.threads),
        ):

            def on_step(row: Row) -> None:
                record(row)
                log(row)
                on_row(row)

            try:
                ending = _train(run, state, runtime, on_step, on_note)
            except DivergedError as error:
                run.write_result(summarize(run, state, Ending("diverged"), str(device)))
                kept = ", ".join(f"step {step}" for step in run.list_checkpoints()) or "none yet"
                advice = f"last good checkpoint: {kept}; try a lower --learning-rate"
                raise DivergedError(f"{error}; {advice}") from error
        on_note("evaluating shortcuts, and weights set by hand")
        result = summarize(run, state, ending, str(device))
        run.write_result(result)
        return result


def try_out(run: Run, device: torch.device | None = None) -> None:
    """Build a run's model and pass it a row of each stage, so that errors show before training.

    Args:
        run: what to train.
        device: where it will be trained; None: the CPU. What a step takes is estimated for a CPU.

    Raises:
        ValueError: for a schedule over repeated rows, options that no layer takes, sizes that
            memory does not hold, or a mixer that raises or does not map [b t d] to [b t d].
    """
    check(run.task, run.train)
    with refuse_weights(run.model, run.task.vocab_size, copies=COPIES):
        model = run.build()
    on_cpu, is_long = device is None or device.type == "cpu", run.task.seq_len > 2 * TOKENS
    if on_cpu and is_long:  # before a row that may be too long
        check_step(run, model)
    for stage in reversed(list_stages(run.task, run.train)):
        batch = stage.task.batch(size=1, seed=run.train.seed)
        # With gradients, as in training: a backend may have none.
        with check_mixers(model), _name_length(stage.task.seq_len, run.task.seq_len):
            score(model, batch, "fp32")
    if on_cpu and not is_long:
        check_step(run, model)


@contextmanager
def _name_length(seq_len: int, full: int) -> Iterator[None]:
    """Add the row length to an error at a length that the user did not ask for."""
    try:
        yield
    except ValueError as error:
        if seq_len == full:
            raise
        advice = "--start-len or --no-lengthen starts with longer ones"
        raise ValueError(f"{error}; rows start short: this is at {seq_len}, {advice}") from error


def _certify(
    run: Run, runtime: Runtime, device: torch.device, on_note: Callable[[str], None]
) -> str:
    """Certify the layers if asked to, or else those of others; keep and return what is found."""
    wanted = run.model.model is not None if runtime.certify is None else runtime.certify
    if not wanted:
        return ""
    from lab.training.certifying import certify_layers

    on_note("certifying the layers")
    certificate = certify_layers(run, device, every=runtime.certify is True)
    write_certificate(run, certificate)
    return f"{describe_certificate(certificate)} ({certificate['cpu_seconds']:.1f} s)"


def _plan(
    run: Run, state: TrainingState, device: torch.device, threads: int | None, *, timed: bool
) -> Plan:
    """Choose the precision and the threads if the run has none yet, and return the plan."""
    stages = list_stages(run.task, run.train)
    # A run keeps what it began with: other choices round differently.
    state.precision = state.precision or run.train.precision
    threads = threads or state.threads or None
    times = measure(run, stages, device, state.precision, threads, choose_only=not timed)
    best, *others = times
    state.precision, state.threads = best.precision, best.threads
    return Plan(
        device=device,
        best=best,
        others=others,
        parameters=state.model.parameter_count(),
        first_step=state.step,
        seq_lens=tuple(stage.task.seq_len for stage in stages[state.stage :]),
        slowing=best.last / best.first if len(stages) > 1 else 1.0,
    )


def _train(
    run: Run,
    state: TrainingState,
    runtime: Runtime,
    on_step: Callable[[Row], None],
    on_note: Callable[[str], None],
) -> Ending:
    """Take steps, checkpointing, until one of the reasons to end."""
    began, metrics = time.monotonic(), run.read_metrics()
    if _is_solved(metrics.last_test, state.step, run.train):
        return Ending("solved")
    pace = Pace()
    # As if it had not been interrupted.
    for before in metrics:
        pace.update(before["step"], before["accuracy"])
    with catch_interrupts() as find_interrupt:
        for row in fit(run.task, state, run.train, state.precision, on_note):
            on_step(row)
            lengthened = state.stage_step == row.step
            due = pace.update(row.step, row.accuracy)
            if runtime.history and (due or lengthened):
                run.keep_weights(state)
            number = find_interrupt()
            late = (
                runtime.max_minutes is not None
                and time.monotonic() - began >= 60 * runtime.max_minutes
            )
            solved = _is_solved(vars(row), state.step, run.train)
            if (solved or number or late or lengthened) or row.step % runtime.checkpoint_every == 0:
                run.save_checkpoint(state)
            if solved:
                return Ending("solved")
            if number or late:
                return Ending("interrupted", number)
        run.save_checkpoint(state)
    return Ending("budget")


def _is_solved(row: Mapping[str, Any], step: int, config: TrainConfig) -> bool:
    """Whether the evaluation in a row of metrics, if it is of this step, ends the run."""
    accuracy = row.get("test_accuracy") if row.get("step") == step else None
    return config.early_stop and accuracy is not None and accuracy >= config.solved_at
