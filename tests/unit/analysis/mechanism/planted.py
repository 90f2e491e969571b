"""Planted models, measured once, and what tests of the mechanism measure on them."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from analysis.base import Subject
from analysis.mechanism import Mechanism, measure
from analysis.mechanism.couples import Couples, draw_couples, measure_baseline
from analysis.mechanism.effects import Edited
from lab.models import build
from lab.models.language_model import LanguageModel
from tasks.base import Batch
from tests import mechanisms

ROWS = mechanisms.TASK.batch(split="test", size=12)


def measure_mechanism(model: LanguageModel, batch: Batch = ROWS) -> tuple[Mechanism, Edited | None]:
    found = measure(Subject(mechanisms.TASK, model, batch))
    mechanism, edited = found[0], found[1] if len(found) > 2 else None
    assert isinstance(mechanism, Mechanism)
    assert edited is None or isinstance(edited, Edited)
    return mechanism, edited


@cache
def measure_planted(name: str) -> tuple[Mechanism, Edited | None]:
    """Measure a planted model once."""
    return measure_mechanism(MAKERS[name]())


MAKERS = {
    "induction": mechanisms.induction,
    "induction by SSD": mechanisms.ssd_induction,
    "induction over four blocks": mechanisms.deep_induction,
    "induction two positions late": mechanisms.late_induction,
    "direct in layer 1": mechanisms.direct,
    "direct in layer 0": lambda: mechanisms.direct("AN AN", 0),
    "direct in one block": lambda: mechanisms.direct("AN", 0),
    "direct two positions late": mechanisms.late_direct,
    "direct two positions late in one block": lambda: mechanisms.late_direct("AN", 0),
    "positional": mechanisms.positional,
    "mixed": mechanisms.mixed,
    "undecided, untrained": mechanisms.untrained,
    "undecided, always one value": mechanisms.constant,
}
"""By name, which begins with the right label."""


def make_generator() -> np.random.Generator:
    return np.random.default_rng(0)


def build_random(stack: str) -> tuple[LanguageModel, Couples]:
    options = {"S.dt_init": "paper"} if "S" in stack else {}
    vocab_size = mechanisms.VOCAB
    model = build(stack, vocab_size=vocab_size, d_model=16, n_heads=2, options=options)
    model = model.double().eval()
    found = draw_couples(mechanisms.TASK, ROWS[:6], make_generator())
    assert found is not None
    # Random weights move the margin either way: rows where it is moved down make the sum ≤ 0.
    known = measure_baseline(model, found)
    moved = (known.clean - known.corrupt).sum((1, 2)) > 0
    assert moved.sum() >= 2
    return model, replace(found, valid=found.valid & moved[:, None])


def compute_margin(logits: torch.Tensor, pairs: Couples, row: int, j: int) -> float:
    """Margin of logits [t v] of a row."""
    at = logits[pairs.query[row, 0, j]]
    return (at[pairs.right[row, 0, j]] - at[pairs.right[row, 0, 1 - j]]).item()
