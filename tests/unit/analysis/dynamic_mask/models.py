"""Models with planted masks, a run with a planted history, and masking by its definition."""

import math

import numpy as np
import torch

from analysis.base import Subject
from analysis.dynamic_mask.masks import (
    LIGHT,
    MaskedHead,
    find_masked_layers,
    measure_heads,
    record_masked_layers,
)
from lab.config import ModelConfig, TrainConfig
from lab.models import LanguageModel, build
from lab.training.checkpoint import keep_weights
from lab.training.run import Run
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=64)


def build_model(mask: str, *, n_heads: int = 1, window: int | None = None, **more) -> LanguageModel:
    options = {"A.mask": mask, "A.max_seq_len": 40, **more}
    if window is not None:
        options["A.window"] = window
    built = build("AM*2", vocab_size=64, d_model=16, n_heads=n_heads, options=options, seed=1)
    return built.eval()


def build_subject(built: LanguageModel, rows: int = 6, run: Run | None = None) -> Subject:
    return Subject(TASK, built, TASK.batch(split="test", size=rows), run=run)


def close_positions(built: LanguageModel, masked: torch.Tensor) -> LanguageModel:
    """Mask these positions with a straight-through table."""
    for module in find_masked_layers(built).values():
        table = dict(module.named_parameters())["mask.l"]
        with torch.no_grad():
            table[:, : len(masked)] = 1.0 - masked.float()
    return built


def find_masked_by_loop(bias, window):
    """Return which keys [t s] of one head are masked, by the definition."""
    size = len(bias)
    masked = np.zeros((size, size), bool)
    for t in range(size):
        best = max(bias[: t + 1])
        for s in range(t + 1):
            outranking = sum(
                bias[o] > bias[s] or (bias[o] == bias[s] and o > s) for o in range(t + 1)
            )
            outside = window is not None and outranking >= window
            masked[t, s] = outside or math.exp(bias[s] - best) < LIGHT
    return masked


def measure_first_head(built: LanguageModel, rows: int = 6) -> MaskedHead:
    batch = TASK.batch(split="test", size=rows)
    layer = record_masked_layers(built, batch)[0]
    return measure_heads(layer, batch, 4, np.random.default_rng(0))[0]


def build_run(tmp_path, mask: str) -> Run:
    """Return a run whose weights were set by hand: l falls by 0.1 a step at position 3."""
    options = {"A.mask": mask, "A.max_seq_len": 40}
    run = Run(
        tmp_path / mask, TASK, ModelConfig(stack="AM*2", d_model=16, options=options), TrainConfig()
    )
    run.claim()
    state = run.load_state()
    for step in (1, 2, 4):
        for name, p in state.model.named_parameters():
            if name.endswith("mask.l") and mask != "literal":
                p.data[:, 3] -= 0.1
        state.step = step
        keep_weights(run, state.step, state.model)
    return run
