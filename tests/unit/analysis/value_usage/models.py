"""Untrained models with values, and a run with a planted history."""

import torch

from analysis.base import Subject
from lab.config import ModelConfig, TrainConfig
from lab.layers.inner_function import InnerFunctionAttention
from lab.models import LanguageModel, build
from lab.training.checkpoint import keep_weights
from lab.training.run import Run
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=64)


ROLES = TASK.batch(split="test", size=8).roles.numpy()


def build_model(**options) -> LanguageModel:
    given = {"I.n_values": 4, **{f"I.{name}": value for name, value in options.items()}}
    return build("IM*2", vocab_size=64, d_model=16, options=given, seed=1).eval()


def build_subject(built: LanguageModel, rows: int = 8, run: Run | None = None) -> Subject:
    return Subject(TASK, built, TASK.batch(split="test", size=rows), run=run)


def build_run(tmp_path) -> Run:
    """Return a run whose weights were set by hand: all keys are zero, then those of 2 and 3 not."""
    config = ModelConfig(stack="IM", d_model=16, options={"I.n_values": 4, "I.key_init": "zeros"})
    run = Run(tmp_path / "run", TASK, config, TrainConfig())
    run.claim()
    state = run.load_state()
    layer = state.model.blocks[0].mixer
    assert isinstance(layer, InnerFunctionAttention)
    for step in (1, 2):
        state.step = step
        with torch.no_grad():
            layer.value_keys[0] = 0.0
            layer.value_keys[2] = float(step > 1)
            layer.value_keys[3] = -float(step > 1)
        keep_weights(run, state.step, state.model)
    return run
