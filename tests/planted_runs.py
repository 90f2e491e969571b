"""Run folders without training, whose kept weights are edited; and series without a change."""

import functools

import numpy as np
import torch

from analysis.base import Subject
from analysis.statistics.change_points import (
    estimate_noise_bound,
)
from lab.config import ModelConfig, TrainConfig
from lab.training import history
from lab.training.runs import Run
from tasks.mqar import MQAR

STEPS = np.array([0, *sorted({round(2 ** (k / 2)) for k in range(21)})])
"""0, then the powers of √2 up to 1,024."""
PLACE = np.log2(1.0 + STEPS)


def bound(steps=STEPS) -> float:
    return _bound(tuple(steps.tolist()))


@functools.cache
def _bound(steps: tuple[int, ...]) -> float:
    return estimate_noise_bound(np.array(steps), np.random.default_rng(0))


def walks(rng, count: int, steps=STEPS, size: float = 1.0) -> np.ndarray:
    """Random walks along log₂(1 + step)."""
    strides = rng.normal(size=(count, len(steps))) * np.sqrt(
        np.diff(np.log2(1.0 + steps), prepend=0)
    )
    return size * strides.cumsum(-1)


def planted(path, stack="AM AM", steps=(1, 4, 16, 64, 256), *, seed=0, options=None) -> Run:
    """A run folder without training: the same initial weights at every step."""
    model = ModelConfig(stack=stack, d_model=16, n_heads=2, options=options or {})
    run = Run(path, MQAR(seq_len=16, vocab_size=32), model, TrainConfig(seed=seed))
    run.claim()
    for step in steps:
        history.save(run.path, step, run.build())
    return run


def edit(run: Run, first: int, name: str, how) -> None:
    """Change a weight at a step and all that come after."""
    for step in run.list_steps():
        if step >= first:
            model = run.load_model(step)
            with torch.no_grad():
                weight = model.get_parameter(name)
                weight.copy_(how(weight))
            history.save(run.path, step, model)


def subject(run: Run, rows: int = 6) -> Subject:
    return Subject.of(run, step=0, rows=rows)
