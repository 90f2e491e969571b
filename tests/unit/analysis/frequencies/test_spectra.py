"""Planted energies are measured, and a planted frequency is found to carry the answers."""

import math

import numpy as np
import pytest
import torch

from analysis.frequencies.rotation import (
    link_edges,
    measure_score_spread,
)
from analysis.frequencies.spectra import FrequencyUses, measure_spectrum, measure_use
from tests.unit.analysis.frequencies.models import (
    TASK,
    plant_product,
)


def test_one_planted_frequency_has_all_the_energy():
    theta = 100.0 ** -(np.arange(8) / 8)
    result = measure_spectrum(plant_product(np.eye(8)[6], theta))
    assert result.effective[0] == pytest.approx(1)
    assert result.share[0, 6] == pytest.approx(1)
    assert (2 * math.pi / theta > 16).tolist() == [False] * 2 + [True] * 6
    assert result.long[0] == pytest.approx(1)
    assert result.uniform_long == 6 / 8


def test_only_the_planted_frequency_carries_the_answers():
    theta = 100.0 ** -(np.arange(8) / 8)
    batch = TASK.batch(split="test", size=40)
    rotation = plant_product(np.zeros(8), theta, rows=40)
    noise = np.random.default_rng(0).normal(size=rotation.q.shape)
    rotation.q[:] = torch.from_numpy(0.1 * noise)
    edges = link_edges(batch, "query_pos", "value_pos")
    rotation.q[edges.rows, edges.targets, 0, 6] += 5
    rotation.k[:, :, 0, 6] = 0.1
    rotation.k[edges.rows, edges.sources, 0, 6] = 1
    result = measure_use(rotation, "query → value", edges, np.random.default_rng(1))
    assert result.by_pair[0].argmax() == 6
    assert result.by_pair[0, 6] / result.advantage[0] == pytest.approx(1, abs=0.1)
    assert result.long[0] == pytest.approx(1, abs=0.1)
    assert 0 < result.interval[0] < result.advantage[0] < result.interval[1]
    assert FrequencyUses((result,), 16).find_sure() == [result]


@pytest.mark.parametrize(("relative", "parts"), [(1e-6, False), (1e-4, True)])
def test_only_a_spread_beyond_rounding_is_divided_by(relative: float, parts: bool):
    scores = 4 + 4 * relative * np.random.default_rng(0).standard_normal((1000, 1, 2))
    [spread] = measure_score_spread(scores)
    assert np.isfinite(spread) == parts
    assert measure_score_spread(np.zeros((9, 1, 2))) == np.inf
    assert not parts or spread == pytest.approx(scores.sum(-1).std())
