"""Steps of training on hard MQAR, for benchmarks: no run folder, no evaluation, one row length."""

from collections.abc import Iterator
from pathlib import Path

import torch

from lab.config import ModelConfig, TrainConfig
from lab.training.loop import Row, TrainingState, fit, start
from lab.training.run import Run
from tasks.mqar import MQAR


def describe_steps(stack: str, seq_len: int, vocab_size: int, rows: int, seed: int = 0) -> Run:
    """Return a run of width 64 with `rows` rows a step, which is not written."""
    task = MQAR(seq_len=seq_len, vocab_size=vocab_size)
    train = TrainConfig(batch_size=rows, eval_every=TrainConfig.max_steps, seed=seed)
    return Run(Path("not written"), task, ModelConfig(stack=stack, d_model=64), train)


def begin(run: Run, precision: str, device: torch.device) -> TrainingState:
    """Return the state before the run's first step."""
    return start(run.build().to(device), run.train, precision)


def take_steps(
    run: Run, precision: str, device: torch.device, *, may_record: bool = True
) -> Iterator[Row]:
    """Yield a row for each step of a run, in a precision, on a device."""
    state = begin(run, precision, device)
    return fit(run.task, state, run.train, may_record=may_record)
