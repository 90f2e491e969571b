"""Carrying out a run: claim the folder, resume or begin, train, checkpoint, evaluate, conclude."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from lab.config import Runtime, TrainConfig
from lab.device import bf16_pays, choose_device
from lab.runs import Run
from lab.train import DivergedError, Row, State, evaluate, fit
from tasks.base import Task, accuracy

AUDIT_ROWS = 256
"""Test rows on which shortcuts and oracle are scored."""


@dataclass(frozen=True)
class Plan:
    """What is about to happen.

    Attributes:
        device: where it computes.
        precision: "fp32" or "bf16".
        parameters: how many numbers the model holds.
        first_step: steps already taken by an earlier part of this run.
        last_step: steps at most.
    """

    device: torch.device
    precision: str
    parameters: int
    first_step: int
    last_step: int


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
    done = run.result()
    if done is not None and done["stopped"] in ("solved", "budget"):
        return done
    state = run.load(device)
    run.rewind_metrics(state.step)
    precision = run.train.precision
    if precision == "auto":
        precision = "bf16" if bf16_pays(device) else "fp32"
    on_plan(Plan(device, precision, state.model.parameter_count(), state.step, run.train.max_steps))
    history = run.metrics()
    seconds = sum(row["seconds"] for row in history)
    began = time.monotonic()
    stopped = "budget"
    solved = bool(history) and _solved(history[-1], run.train)
    with run.recording() as record, interrupts() as interrupted:
        try:
            for row in () if solved else fit(run.task, state, run.train, precision):
                record(row)
                on_row(row)
                seconds += row.seconds
                solved = _solved(vars(row), run.train)
                if solved:
                    break
                if interrupted() or _over(runtime.max_minutes, began):
                    stopped = "interrupted"
                    break
                if row.step % runtime.checkpoint_every == 0:
                    run.save(state)
            run.save(state)
        except DivergedError:
            run.write_result(_result(run, state, seconds, "diverged"))
            raise
    result = _result(run, state, seconds, "solved" if solved else stopped)
    run.write_result(result)
    return result


def baselines(task: Task, seed: int) -> dict[str, float]:
    """Return the test accuracy of chance, of each shortcut and of the oracle, in [0, 1]."""
    batch = task.batch(split="test", size=AUDIT_ROWS, seed=seed)
    rules = {**task.shortcuts(), "oracle": task.oracle}
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in rules.items()}
    return {"chance": task.chance, **scores}


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a question: has SIGINT or SIGTERM come? A second signal acts as it always does."""
    seen: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _solved(row: Mapping[str, Any], config: TrainConfig) -> bool:
    return config.early_stop and (row.get("test_accuracy") or 0.0) >= config.solved_at


def _over(minutes: float | None, began: float) -> bool:
    return minutes is not None and time.monotonic() - began >= 60 * minutes


def _result(run: Run, state: State, seconds: float, stopped: str) -> dict[str, Any]:
    loss, right = (None, None)
    if stopped != "diverged":
        loss, right = evaluate(run.task, state.model, run.train)
    rows = state.step * run.train.batch_size
    return {
        "task": run.task.name,
        "model": run.model.model or run.model.stack,
        "accuracy": right,
        "loss": loss,
        "steps": state.step,
        "rows": rows,
        "seconds": seconds,
        "rows_per_second": rows / seconds if seconds else None,
        "parameters": state.model.parameter_count(),
        "stopped": stopped,
        "baselines": baselines(run.task, run.train.seed),
    }
