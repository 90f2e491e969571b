"""Masks that do harm are named, and masks are measured past their length."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from analysis import dynamic_mask
from analysis.base import Subject
from analysis.dynamic_mask.beyond import measure_beyond
from analysis.dynamic_mask.effect import MaskEffect
from analysis.dynamic_mask.masks import find_masked_layers
from analysis.statistics.estimates import Estimate, westfall_young
from lab.layers.mask import SoftMask
from lab.models import build
from tasks.mqar import MQAR
from tests.unit.analysis.dynamic_mask.models import build_model, build_subject


def test_a_mask_without_which_more_is_right_is_said_to_do_harm():
    effect = dynamic_mask.measure(build_subject(build_model("straight-through")))[2]
    assert isinstance(effect, MaskEffect)
    assert "harm." not in dynamic_mask.describe(effect).says
    gains = np.zeros((64, 2))
    gains[:, 1] = np.random.default_rng(0).normal(0.3, 0.1, 64)
    harm = tuple(westfall_young(-gains, np.random.default_rng(0)).tolist())
    removal = (effect.removal[0], Estimate(0.3, 0.28, 0.32, 0.0))
    harmful = replace(effect, harm=harm, removal=removal)
    says = dynamic_mask.describe(harmful).says
    assert "More answers are right without the masks of layer 1: they do harm." in says
    fig = dynamic_mask.draw(harmful)
    assert fig is not None
    notes = [note["text"] for note in fig.to_dict()["layout"]["annotations"]]
    assert [note.endswith(", does harm") for note in notes] == [False, True]


def test_whiskers_go_to_the_true_ends():
    effect = dynamic_mask.measure(build_subject(build_model("straight-through")))[2]
    assert isinstance(effect, MaskEffect)
    head = effect.heads[0]
    assert head.pairs is not None
    pairs = replace(head.pairs, answer=Estimate(0.5, 0.45, 0.7, 0.3))
    fig = dynamic_mask.draw(replace(effect, heads=(replace(head, pairs=pairs),)))
    assert fig is not None
    traces: Any = fig.data
    [whiskers] = [trace.error_x for trace in traces if trace.error_x.array is not None]
    np.testing.assert_allclose(whiskers.array, [0.2])
    np.testing.assert_allclose(whiskers.arrayminus, [0.05])


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


def test_every_head_is_measured_on_rows_of_twice_the_length():
    built = build_model("value", n_heads=2, **{"A.n_kv_heads": 2})
    found = measure_beyond(build_subject(built), np.random.default_rng(0))
    assert len(found.auroc) == 4


def test_removing_a_mask_that_does_nothing_changes_nothing():
    effect = dynamic_mask.measure(build_subject(build_model("soft")))[2]
    assert isinstance(effect, MaskEffect)
    assert [change.value for change in effect.removal] == [0.0, 0.0]
