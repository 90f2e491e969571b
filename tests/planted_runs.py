"""Run folders without training, whose kept weights are edited; and series without a change."""

import functools
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from analysis.base import Subject
from analysis.statistics.change_points import (
    estimate_noise_bound,
)
from lab.config import ModelConfig, TrainConfig
from lab.training.checkpoint import keep_weights
from lab.training.run import Run
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
        keep_weights(run, step, run.build())
    return run


def make_row(step: int, **fields: Any) -> Any:
    """Return a row of metrics.jsonl."""
    made = {"step": step, "seq_len": 16, "loss": 1.0, "accuracy": 0.5, "learning_rate": 1e-3}
    return {**made, "grad_norm": 1.0, "seconds": 0.5, "cpu_seconds": 0.5, **fields}


def make_result(**fields: Any) -> dict[str, Any]:
    """Return the content of a result.json."""
    none = ("signal", "interval", "perplexity", "rows_per_second", "set_by_hand", "diagnosis")
    made = {"task": "mqar", "model": "AM", "accuracy": 0.5, "loss": 1.0, "steps": 4, "rows": 16}
    where = {"device": "cpu", "machine": "a machine", "precision": "fp32"}
    sizes = {
        "seconds": 1.0,
        "cpu_seconds": 1.0,
        "parameters": 1,
        "state_bytes": 1,
        "seq_len": 16,
        "stages": [],
    }
    return {**dict.fromkeys(none), **made, **where, **sizes, "baselines": {}, **fields}


def write_rows(run: Run, rows: Iterable[dict[str, Any]]) -> None:
    """Write metrics.jsonl."""
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (run.path / "metrics.jsonl").write_text(lines)


def edit(run: Run, first: int, name: str, how) -> None:
    """Change a weight at a step and all that come after."""
    for step in run.list_steps():
        if step >= first:
            model = run.load_model(step)
            with torch.no_grad():
                weight = model.get_parameter(name)
                weight.copy_(how(weight))
            keep_weights(run, step, model)


def subject(run: Run, rows: int = 6) -> Subject:
    return Subject.of(run, step=0, rows=rows)
