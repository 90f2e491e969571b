"""Running an experiment: claim the folder, resume or begin, train, checkpoint, conclude."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lab.config import Runtime
from lab.lengthening import list_stages
from lab.machine.device import choose_device
from lab.machine.growth import TOKENS
from lab.machine.launch import LostProcessError
from lab.models.evaluation import score
from lab.models.memory import refuse_weights
from lab.models.user_mixer import check_mixers
from lab.training.conclusion import Ending
from lab.training.divergence import DivergedError
from lab.training.fit import fit
from lab.training.footprint import COPIES, check_step
from lab.training.row import Row
from lab.training.runs import Run
from lab.training.session import Session, claim_folder
from lab.training.signals import catch_interrupts
from lab.training.state import TrainingState
from lab.training.step_time import StepTime, measure, use_threads
from lab.training.stepper import check

if TYPE_CHECKING:
    from lab.machine.launch import Launch
    from lab.training.parallel import Leader


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
        processes: how many share the rows of a step.
    """

    device: torch.device
    best: StepTime
    others: list[StepTime]
    parameters: int
    first_step: int
    seq_lens: tuple[int, ...]
    slowing: float
    certified: str = ""
    processes: int = 1


def carry_out(
    run: Run,
    runtime: Runtime,
    on_plan: Callable[[Plan], None] | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    on_note: Callable[[str], None] = lambda text: None,
    launch: "Launch | None" = None,
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
        launch: of this process as the one that leads others (`lab.training.parallel`); None: alone.

    Raises:
        ValueError: when the device asked for is not there.
        RunError: when the folder cannot be used or written, or another process has ended.
        UnlawfulError: when a layer breaks a law that training relies on, before the first step.
        DivergedError: with the last good checkpoint kept and `stopped: diverged` written.
    """
    device = choose_device(runtime.device)
    with claim_folder(run) as done:
        if done is not None:
            return done
        session = Session(run, runtime, device, on_row, on_note)
        state, certified = session.state, session.certify()
        plan = plan_training(session.run, state, device, runtime.threads, timed=on_plan is not None)
        session.keep_precision()
        if on_plan is not None:
            processes = 1 if launch is None else launch.count
            on_plan(replace(plan, certified=certified, processes=processes))
        with session.record(), use_threads(state.threads):
            try:
                with _lead(launch, session) as leader:
                    ending = _train(session, leader)
            except DivergedError as error:
                session.conclude(Ending("diverged"))
                raise explain_divergence(run, error) from error
        return session.conclude(ending)


def explain_divergence(run: Run, error: DivergedError) -> DivergedError:
    """Return the error with what is kept of the run, and what to try."""
    kept = ", ".join(f"step {step}" for step in run.list_checkpoints()) or "none yet"
    return DivergedError(f"{error}; last good checkpoint: {kept}; try a lower --learning-rate")


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
    if on_cpu and is_long:  # before trying a row that memory may not hold
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


def plan_training(
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


def _lead(launch: "Launch | None", session: Session) -> "AbstractContextManager[Leader | None]":
    """Have other processes help, if there are any, for a `with` block."""
    if launch is None:
        return nullcontext()
    # It imports what a single process does not need.
    from lab.training.parallel import lead

    return lead(launch, session.run, session.state)


def _train(session: Session, leader: "Leader | None") -> Ending:
    """Take steps, checkpointing, until one of the reasons to end."""
    if session.is_solved():
        return Ending("solved")
    run, state = session.run, session.state
    with catch_interrupts() as find_own:
        find_interrupt = find_own if leader is None else lambda: find_own() or leader.interrupt
        try:
            for row in fit(run.task, state, run.train, state.precision, session.on_note, leader):
                ending = session.keep(row, find_interrupt)
                if ending is not None:
                    return ending
        except LostProcessError:
            if state.step:
                run.save_checkpoint(state)
            raise
        run.save_checkpoint(state)
    return Ending("budget")
