"""Kept keys are drawn where they are, harm is counted, and masks are measured past their length."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from analysis import dynamic_mask
from analysis.base import NotApplicableError, Subject
from analysis.dynamic_mask.effect import KeptByPosition, MaskEffect, measure_beyond
from analysis.dynamic_mask.masks import find_masked_layers, record_masked_layers
from analysis.plain import to_plain
from analysis.statistics.comparisons import westfall_young
from lab.intervals import Estimate
from lab.layers.mask import SoftMask
from lab.models import build
from tasks.mqar import FILLER, MQAR
from tests.unit.analysis.dynamic_mask.models import (
    TASK,
    build_model,
    build_run,
    build_subject,
    close_positions,
    find_masked_by_loop,
)


def test_a_mask_without_which_more_is_right_is_said_to_do_harm():
    effect = dynamic_mask.measure(build_subject(build_model("straight-through")))[2]
    assert isinstance(effect, MaskEffect)
    assert "layers whose mask does harm: 0 of 2" in effect.says
    gains = np.zeros((64, 2))
    gains[:, 1] = np.random.default_rng(0).normal(0.3, 0.1, 64)
    harm = tuple(westfall_young(-gains, np.random.default_rng(0)).tolist())
    removal = (effect.removal[0], Estimate(0.3, 0.28, 0.32, 0.0))
    harmful = replace(effect, harm=harm, removal=removal)
    assert "layers whose mask does harm: 1 of 2" in harmful.says
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


def test_every_head_is_measured_on_rows_of_twice_the_length():
    built = build_model("value", n_heads=2, **{"A.n_kv_heads": 2})
    found = measure_beyond(build_subject(built), np.random.default_rng(0))
    assert len(found.auroc) == 4


def test_removing_a_mask_that_does_nothing_changes_nothing():
    effect = dynamic_mask.measure(build_subject(build_model("soft")))[2]
    assert isinstance(effect, MaskEffect)
    assert [change.value for change in effect.removal] == [0.0, 0.0]


def test_kept_keys_are_drawn_where_they_are():
    roles = TASK.batch(size=1).roles[0]
    built = close_positions(build_model("straight-through"), roles == FILLER)
    of = build_subject(built)
    kept = dynamic_mask.measure(of)[2]
    assert isinstance(kept, KeptByPosition)
    assert kept.bands == tuple(range(0, 17, 2))
    layer = record_masked_layers(built, of.batch)[0]
    shares: dict[tuple[int, int], list[bool]] = {}
    for b in range(len(of.batch.inputs)):
        masked = find_masked_by_loop(layer.bias[b, 0].double().tolist(), None)
        for t, s in np.argwhere(np.tri(16)).tolist():
            shares.setdefault((int(of.batch.roles[b, s]), s // 2), []).append(not masked[t, s])
    traces: Any = kept.figure().data
    cells = traces[0].z
    for role, band in np.ndindex(4, 8):
        found = kept.heads[0].kept_by_band[role, band]
        if (role, band) not in shares:
            assert np.isnan(found)
            continue
        assert found == pytest.approx(np.mean(shares[role, band]))
        assert cells[role, band] == pytest.approx(found)
    assert "(filler at" in kept.says


def test_a_model_without_masks_is_not_measured():
    with pytest.raises(NotApplicableError, match="no block has a dynamic mask"):
        dynamic_mask.measure(build_subject(build("AM SM", vocab_size=64, d_model=16).eval()))


@pytest.mark.parametrize("mask", ["straight-through", "value"])
def test_every_finding_is_drawn_and_recorded(tmp_path, mask):
    run = build_run(tmp_path, mask)
    results = dynamic_mask.measure(replace(build_subject(run.load_model(4)), run=run))
    names = ["BiasValues", "KeySelection", "MaskEffect", "MaskTrajectory", "MaskHistory"]
    assert [type(result).__name__ for result in results] == names
    for result in results:
        assert "nan" not in result.says
        json.dumps(to_plain(result), allow_nan=False)
        assert isinstance(result.figure(), go.Figure)
