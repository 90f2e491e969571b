"""The history follows the table of a run step by step."""

from dataclasses import replace

import numpy as np

from analysis import dynamic_mask
from analysis.dynamic_mask.history import MaskHistory
from analysis.dynamic_mask.trajectory import MaskTrajectory
from tests.unit.analysis.dynamic_mask.models import build_run, build_subject


def test_history_follows_the_table(tmp_path):
    run = build_run(tmp_path, "soft")
    results = dynamic_mask.measure(replace(build_subject(run.load_model(4)), run=run))
    past, way = results[-1], results[-2]
    assert isinstance(past, MaskHistory)
    assert isinstance(way, MaskTrajectory)
    assert past.steps.tolist() == [0, 1, 2, 4]
    np.testing.assert_allclose(past.drifts, np.arange(4)[:, None] * [[0.1, 0.1]], atol=1e-6)
    assert (past.gradients > 0).all()
    assert way.values.shape == (4, 2, 16)
    np.testing.assert_allclose(way.values[:, 0, 3], [1, 0.9, 0.8, 0.7], rtol=1e-6)
    assert (np.delete(way.values, 3, axis=2) == 1).all()


def test_a_literal_mask_is_dead_all_along(tmp_path):
    run = build_run(tmp_path, "literal")
    past = dynamic_mask.measure(replace(build_subject(run.load_model(4)), run=run))[-1]
    assert isinstance(past, MaskHistory)
    assert (past.gradients == 0).all()
    assert (past.drifts == 0).all()
    assert "dead" in dynamic_mask.describe(past).says
