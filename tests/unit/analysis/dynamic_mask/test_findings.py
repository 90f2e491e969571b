"""Every finding has words, a figure and a record."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis import dynamic_mask
from analysis.base import NotApplicableError
from analysis.dynamic_mask.biases import BiasValues
from analysis.dynamic_mask.effect import MaskEffect
from analysis.dynamic_mask.history import MaskHistory
from analysis.dynamic_mask.kept_by_position import KeptByPosition
from analysis.dynamic_mask.masks import record_masked_layers
from analysis.dynamic_mask.selection import KeySelection
from analysis.dynamic_mask.trajectory import MaskTrajectory
from analysis.plain import to_plain
from lab.models import build
from tasks.mqar import FILLER
from tests.unit.analysis.dynamic_mask.models import (
    TASK,
    build_model,
    build_run,
    build_subject,
    close_positions,
    find_masked_by_loop,
)


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
    fig = dynamic_mask.draw(kept)
    assert fig is not None
    traces: Any = fig.data
    cells = traces[0].z
    for role, band in np.ndindex(4, 8):
        found = kept.heads[0].kept_by_band[role, band]
        if (role, band) not in shares:
            assert np.isnan(found)
            continue
        assert found == pytest.approx(np.mean(shares[role, band]))
        assert cells[role, band] == pytest.approx(found)
    assert "filler at" in dynamic_mask.describe(kept).says


def test_a_model_without_masks_is_not_measured():
    with pytest.raises(NotApplicableError, match="no block has a dynamic mask"):
        dynamic_mask.measure(build_subject(build("AM SM", vocab_size=64, d_model=16).eval()))


@pytest.mark.parametrize("mask", ["straight-through", "value"])
def test_every_finding_is_described_drawn_and_recorded(tmp_path, mask):
    run = build_run(tmp_path, mask)
    results = dynamic_mask.measure(replace(build_subject(run.load_model(4)), run=run))
    assert [type(result) for result in results] == [
        BiasValues,
        KeySelection,
        MaskEffect,
        MaskTrajectory,
        MaskHistory,
    ]
    for result in results:
        words = dynamic_mask.describe(result)
        assert words.says.endswith(".")
        assert "nan" not in words.says
        json.dumps(to_plain(result), allow_nan=False)
        fig = dynamic_mask.draw(result)
        assert fig is not None
        assert len(fig.to_dict()["data"]) >= 2
