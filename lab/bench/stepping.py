"""Steps of training on hard MQAR, for benchmarks: no run folder, no evaluation, one row length."""

from pathlib import Path

import torch

from lab.config import ModelConfig, TrainConfig
from lab.training.fit import Stepper, start
from lab.training.runs import Run
from tasks.mqar import MQAR


def prepare_steps(
    stack: str, seq_len: int, vocab_size: int, rows: int, device: torch.device
) -> tuple[Run, Stepper]:
    """Return a run of width 64 with `rows` rows a step, and what takes its steps on a device."""
    task = MQAR(seq_len=seq_len, vocab_size=vocab_size)
    train = TrainConfig(batch_size=rows, eval_every=TrainConfig.max_steps)
    run = Run(Path("not written"), task, ModelConfig(stack=stack, d_model=64), train)
    return run, Stepper(task, start(run.build().to(device), train), train)
