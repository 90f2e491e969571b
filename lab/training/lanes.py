"""Training several runs of one shape in one process, each as if it were alone.

Each run has its own rows, weights, optimizers, learning rate, stages, evaluations, checkpoints and
ending, in its own folder. They share the computation of gradients where that is faster
(`lab.training.lane_time`), at each step those at the same row length. Where it is not, they take
turns, and each run is the same bits as alone.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from signal import Signals
from typing import Any

import torch

from lab.config import Runtime
from lab.lengthening import list_stages
from lab.machine.clocks import Spent, read_clocks
from lab.machine.device import choose_device
from lab.training.checkpoint import keep_only
from lab.training.conclusion import Ending
from lab.training.divergence import DivergedError
from lab.training.experiment import Plan, explain_divergence, plan_training
from lab.training.footprint import count_fitting_lanes
from lab.training.lane_time import LaneTime, measure_lanes
from lab.training.row import Row
from lab.training.runs import Run
from lab.training.session import Session, claim_folder
from lab.training.signals import catch_interrupts
from lab.training.step_time import use_threads
from lab.training.stepper import Stepper
from lab.training.together import advance_together
from tasks.base import Batch

FREE = ("embedding_std",)
"""Options of a model in which lanes may differ: the scale of its initial weights."""


def train_lanes(
    runs: Sequence[Run],
    runtime: Runtime,
    *,
    shared: bool | None = None,
    on_plan: Callable[[Plan, LaneTime], None] | None = None,
    on_row: Callable[[Run, Row], None] = lambda run, row: None,
    on_note: Callable[[Run, str], None] = lambda run, text: None,
    on_end: Callable[[Run, dict[str, Any], DivergedError | None], None] = lambda *ended: None,
) -> list[dict[str, Any]]:
    """Train runs to their ends, from their newest checkpoints, and return their results in order.

    Runs may differ in all but the model's configuration and the vocabulary: in seed, initial
    weights, task, rows and training. SIGINT and SIGTERM end all of them after the current step,
    with checkpoints. A run that diverges ends, and the others go on. Where runs compute together,
    their checkpoints are of the same steps, so that the same runs go on as if nothing had been.

    Args:
        runs: what to train, and where it is kept; each may be resumed alone.
        runtime: of each; its minutes are those of all together.
        shared: whether to compute together; None: as before, or else what is measured to be faster.
        on_plan: called once, before the first step, unless all runs have ended; None where nobody
            asks for times.
        on_row: called after every step of a run.
        on_note: called with what is done now, before what takes longer than a step.
        on_end: called with a run's result when it ends, and of one that had ended; and with the
            reason of a run that has diverged now.

    Raises:
        ValueError: for runs of different shapes, or a device that is not there.
        RunError: when a folder cannot be used or written.
        UnlawfulError: when a layer breaks a law that training relies on, before the first step.
    """
    check_shapes(runs)
    device = choose_device(runtime.device)
    results: dict[int, dict[str, Any]] = {}
    with ExitStack() as locks, catch_interrupts() as find_interrupt:
        claimed: dict[int, ExitStack] = {}
        for number, run in enumerate(runs):
            folder = locks.enter_context(ExitStack())
            done = folder.enter_context(claim_folder(run))
            if done is None:
                claimed[number] = folder
                continue
            folder.close()
            results[number] = done
            on_end(run, done, None)
        step = find_common_step([runs[number] for number in claimed])
        lanes = []
        for number, folder in claimed.items():
            run = runs[number]
            notes = partial(on_row, run), partial(on_note, run)
            session = Session(run, runtime, device, *notes, step)
            stepper = Stepper(run.task, session.state, run.train, session.on_note)
            lanes.append(_Lane(number, session, stepper, folder))

        together = bool(lanes) and _prepare(lanes, runtime, device, shared, on_plan)
        for lane in lanes:
            lane.folder.enter_context(lane.session.record())
        ended = {lane: Ending("solved") for lane in lanes if lane.session.is_solved()}
        due = lanes if together else []
        while lanes:
            # A lane ends, and its last checkpoint goes, only when all have one of this step.
            saved = _save(due, ended)
            for lane, ending in ended.items():
                lane.stepper.stop_recording()
                results[lane.number] = lane.session.conclude(ending)
            for lane in saved:
                keep_only(lane.session.run.path, lane.session.state.step)
            for lane in ended:
                lane.folder.close()
                on_end(lane.session.run, results[lane.number], lane.error)
            lanes = [lane for lane in lanes if lane not in ended]
            ended, due = _take_step(lanes, together, find_interrupt)
            if together and (ended or due):
                due = lanes
    return [results[number] for number in range(len(runs))]


def find_common_step(runs: Sequence[Run]) -> int | None:
    """Return the newest step that all runs have a checkpoint of; None if there is none.

    Runs that compute together write theirs one after another, and drop those before only then.
    """
    steps = [set(run.list_checkpoints()) for run in runs]
    return max(set.intersection(*steps), default=None) if steps else None


def check_shapes(runs: Sequence[Run]) -> None:
    """Check that the models of runs differ in nothing but their weights.

    Raises:
        ValueError: naming the first option that differs.
    """
    for run in runs[1:]:
        first = runs[0]
        for name, value in {**run.model.to_dict(), "vocab_size": run.task.vocab_size}.items():
            known = {**first.model.to_dict(), "vocab_size": first.task.vocab_size}[name]
            if value != known and name not in FREE:
                raise ValueError(f"{name}={value}: must be {known} in all runs of one shape")


@dataclass(eq=False)
class _Lane:
    """A run among others, with what closes its folder."""

    number: int
    session: Session
    stepper: Stepper
    folder: ExitStack
    error: DivergedError | None = None

    def diverge(self, error: DivergedError) -> None:
        """Note why the run has diverged."""
        self.error = explain_divergence(self.session.run, error)

    @property
    def setting(self) -> tuple[str, int]:
        return self.session.state.precision, self.session.state.threads


def _prepare(
    lanes: Sequence[_Lane],
    runtime: Runtime,
    device: torch.device,
    shared: bool | None,
    on_plan: Callable[[Plan, LaneTime], None] | None,
) -> bool:
    """Choose precision and threads, and whether lanes compute together."""
    first, *others = (lane.session for lane in lanes)
    certified = [session.certify() for session in (first, *others)]
    plan = plan_training(first.run, first.state, device, runtime.threads, timed=on_plan is not None)
    for session in others:
        state, wanted = session.state, session.run.train.precision
        chosen = plan.best.precision if wanted == "auto" else wanted
        state.precision = state.precision or chosen
        state.threads = runtime.threads or state.threads or plan.best.threads
    for lane in lanes:
        lane.session.keep_precision()
    if shared is None and any(lane.session.state.shared for lane in lanes):
        shared = True
    times = LaneTime(chosen=shared)
    if shared is None and device.type == "cpu" and len(lanes) > 1:
        fitting = count_fitting_lanes(first.run, len(lanes))
        if fitting < len(lanes):
            shared, times = False, LaneTime(obstacle=f"memory holds {fitting} of them together")
    if shared is None:
        with use_threads(plan.best.threads):
            times = measure_lanes(
                [lane.session.state.model for lane in lanes],
                list_stages(first.run.task, first.run.train),
                first.state.precision,
            )
    for lane in lanes:
        lane.session.state.shared = times.shared
    if on_plan is not None:
        on_plan(replace(plan, certified=certified[0]), times)
    return times.shared


def _save(due: Sequence[_Lane], ended: dict[_Lane, Ending]) -> list[_Lane]:
    """Write checkpoints, those before them kept; return whose. A lane that diverged ends."""
    saved = []
    for lane in due:
        if lane in ended and ended[lane].stopped == "diverged":
            continue
        try:
            lane.session.run.save_checkpoint(lane.session.state, keep_before=True)
            saved.append(lane)
        except DivergedError as error:
            lane.diverge(error)
            ended[lane] = Ending("diverged")
    return saved


def _take_step(
    lanes: Sequence[_Lane], shared: bool, find_interrupt: Callable[[], Signals | None]
) -> tuple[dict[_Lane, Ending], Sequence[_Lane]]:
    """Take a step of every lane; return those that end, and why, and whose checkpoint is due."""
    groups: dict[Hashable, list[tuple[_Lane, Batch, Spent]]] = {}
    over = []
    for lane in lanes:
        began = read_clocks()
        batch = lane.stepper.draw()
        if batch is None:
            over.append(lane)
            continue
        key = (batch.inputs.shape, lane.setting) if shared else lane.number
        drawn = read_clocks() - began
        groups.setdefault(key, []).append((lane, batch, drawn))
    if over:  # end these before the others take a step
        return {lane: Ending("budget") for lane in over}, over
    rows = {lane: row for group in groups.values() for lane, row in _step_group(group)}
    for lane, row in rows.items():
        if row is not None:
            lane.session.take_in(row)
    # Asked once for all lanes, so that all stop after the same step.
    interrupt, ended, due = find_interrupt(), {}, []
    for lane in lanes:
        row = rows[lane]
        ending, saves = (
            (Ending("diverged"), False) if row is None else lane.session.judge(row, interrupt)
        )
        if ending is not None:
            ended[lane] = ending
        if saves:
            due.append(lane)
    return ended, due


def _step_group(
    group: Sequence[tuple[_Lane, Batch, Spent]],
) -> Iterator[tuple[_Lane, Row | None]]:
    """Take the steps of lanes at one row length; yield each with its row, None if it diverged."""
    precision, threads = group[0][0].setting
    with use_threads(threads):
        began, steppers = read_clocks(), [lane.stepper for lane, _, _ in group]
        rows = advance_together(steppers, [batch for _, batch, _ in group], precision)
        each = (read_clocks() - began) / len(group)
        for (lane, _, drawn), row in zip(group, rows, strict=True):
            if isinstance(row, DivergedError):
                lane.diverge(row)
                yield lane, None
            else:
                yield lane, lane.stepper.conclude(row, each + drawn)
