"""Masks that do harm are named, and masks are measured past the length of their rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis import dynamic_mask
from analysis.base import NotApplicableError, Subject
from analysis.dynamic_mask import MaskEffect, measure_beyond
from analysis.dynamic_mask.masks import find_masked_layers
from analysis.statistics.comparisons import westfall_young
from lab.intervals import Estimate
from lab.layers.mask import SoftMask
from lab.models import build
from tasks.mqar import MQAR
from tests.unit.analysis.dynamic_mask.models import (
    build_model,
    build_subject,
)


def test_a_mask_without_which_more_is_right_is_said_to_do_harm():
    effect = dynamic_mask.measure(build_subject(build_model("straight-through")))[2]
    assert isinstance(effect, MaskEffect)
    assert effect.harmful == []
    gains = np.zeros((64, 2))
    gains[:, 1] = np.random.default_rng(0).normal(0.3, 0.1, 64)
    harm = tuple(westfall_young(-gains, np.random.default_rng(0)).tolist())
    removal = (effect.removal[0], Estimate(0.3, 0.28, 0.32, 0.0))
    harmful = replace(effect, harm=harm, removal=removal)
    assert harmful.harmful == [1]
    fig = harmful.figure()
    assert fig is not None
    notes = [note["text"] for note in fig.to_dict()["layout"]["annotations"]]
    assert [note.endswith(", harm") for note in notes] == [False, True]


def test_beyond_the_length_a_table_is_as_it_began():
    built = build_model("soft")
    rng = np.random.default_rng(0)
    for module in find_masked_layers(built).values():
        assert isinstance(module.mask, SoftMask)
        with torch.no_grad():
            module.mask.l[:, :16] = 3.0
    found = measure_beyond(build_subject(built), rng)
    assert (found.entries, found.untouched, found.seq_len) == (24, 1.0, 32)
    expected = torch.sigmoid(torch.tensor(1.0)) / torch.sigmoid(torch.tensor(3.0))
    assert found.weight == pytest.approx(float(expected))
    assert found.accuracy is not None
    # Past the table stand fillers and queries, of lower bias; before it the pairs and the rest.
    assert len(found.auroc) == 2
    short = build("AM", vocab_size=64, d_model=16, options={"A.mask": "soft", "A.max_seq_len": 20})
    assert "table ends at 20" in measure_beyond(build_subject(short.eval()), rng).why
    few = MQAR(seq_len=16, vocab_size=30)
    small = build("AM", vocab_size=30, d_model=16, options={"A.mask": "value"}).eval()
    of_few = Subject(few, small, few.batch(split="test", size=2))
    assert "vocab_size=30" in measure_beyond(of_few, rng).why


def test_removing_a_mask_that_does_nothing_changes_nothing():
    effect = dynamic_mask.measure(build_subject(build_model("soft")))[2]
    assert isinstance(effect, MaskEffect)
    assert [change.value for change in effect.removal] == [0.0, 0.0]


def test_a_model_without_masks_is_not_measured():
    with pytest.raises(NotApplicableError, match="no block has a dynamic mask"):
        dynamic_mask.measure(build_subject(build("AM SM", vocab_size=64, d_model=16).eval()))
