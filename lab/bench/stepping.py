"""Steps of training on hard MQAR, for benchmarks: no run folder, no evaluation, one row length."""

from collections.abc import Sequence
from pathlib import Path

import torch

from lab.config import ModelConfig, TrainConfig
from lab.machine.clocks import Spent
from lab.training.divergence import DivergedError
from lab.training.runs import Run
from lab.training.state import start
from lab.training.stepper import Stepper
from lab.training.together import advance_together
from tasks.mqar import MQAR


def prepare_steps(
    stack: str, seq_len: int, vocab_size: int, rows: int, device: torch.device, seed: int = 0
) -> tuple[Run, Stepper]:
    """Return a run of width 64 with `rows` rows a step, and what takes its steps on a device."""
    task = MQAR(seq_len=seq_len, vocab_size=vocab_size)
    train = TrainConfig(batch_size=rows, eval_every=TrainConfig.max_steps, seed=seed)
    run = Run(Path("not written"), task, ModelConfig(stack=stack, d_model=64), train)
    return run, Stepper(task, start(run.build().to(device), train), train)


def take_steps_together(steppers: Sequence[Stepper], precision: str) -> list[float]:
    """Take a step of each of several trainings as lanes; return their losses."""
    batches = [batch for each in steppers if (batch := each.draw()) is not None]
    losses = []
    for each, row in zip(steppers, advance_together(steppers, batches, precision), strict=True):
        if isinstance(row, DivergedError):
            raise row
        losses.append(each.conclude(row, Spent(0.0, 0.0)).loss)
    return losses
