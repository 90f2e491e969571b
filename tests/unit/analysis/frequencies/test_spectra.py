"""Planted energies are measured, and a planted frequency is found to carry the answers."""

import math

import numpy as np
import pytest
import torch

from analysis.frequencies.rotation import (
    Edges,
    link_edges,
    measure_rotated_sides,
    measure_score_spread,
    sample_placebo,
)
from analysis.frequencies.spectra import Energies, FrequencyUses, measure_spectrum, measure_use
from tests.unit.analysis.frequencies.models import (
    TASK,
    build_subject,
    plant_product,
    score_directly,
)


def test_one_planted_frequency_has_all_the_energy():
    theta = 100.0 ** -(np.arange(8) / 8)
    result = measure_spectrum(plant_product(np.eye(8)[6], theta))
    assert result.effective[0] == pytest.approx(1)
    assert result.share[0, 6] == pytest.approx(1)
    assert (2 * math.pi / theta > 16).tolist() == [False] * 2 + [True] * 6
    assert result.long[0] == pytest.approx(1)
    assert result.uniform_long == 6 / 8


def test_equal_energies_are_as_long_as_uniform():
    theta = 100.0 ** -(np.arange(8) / 8)
    result = measure_spectrum(plant_product(np.exp(1j * np.arange(8)), theta))
    assert result.effective[0] == pytest.approx(8)
    assert result.long[0] == pytest.approx(result.uniform_long)


def test_an_untrained_spectrum_does_not_lean():
    given = build_subject("AM")
    layers = measure_rotated_sides(given.model, given.batch, measure_spectrum)
    assert "0 of 1; to wavelengths within it: 0 of 1." in Energies(tuple(layers), 16).says


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


def test_scores_that_differ_by_rounding_alone_do_not_stand_out():
    batch = TASK.batch(split="test", size=40)
    rotation = plant_product(np.ones(8), 100.0 ** -(np.arange(8) / 8), rows=40)
    edges = link_edges(batch, "value_pos", "key_pos")
    result = measure_use(rotation, "value → key", edges, np.random.default_rng(1))
    assert (result.effect == 0).all()
    assert FrequencyUses((result,), 16).find_sure() == []


@pytest.mark.parametrize(("relative", "parts"), [(1e-6, False), (1e-4, True)])
def test_only_a_spread_beyond_rounding_is_divided_by(relative: float, parts: bool):
    scores = 4 + 4 * relative * np.random.default_rng(0).standard_normal((1000, 1, 2))
    [spread] = measure_score_spread(scores)
    assert np.isfinite(spread) == parts
    assert measure_score_spread(np.zeros((9, 1, 2))) == np.inf
    assert not parts or spread == pytest.approx(scores.sum(-1).std())


def test_an_advantage_is_the_difference_of_two_loops():
    given = build_subject("AM")
    edges = link_edges(given.batch, "query_pos", "value_pos")
    [(found, result)] = measure_rotated_sides(
        given.model,
        given.batch,
        lambda r: (r, measure_use(r, "query → value", edges, np.random.default_rng(3))),
    )
    score, _ = score_directly(found, given.model, given.batch)
    placebo = sample_placebo(edges, 16, np.random.default_rng(3))

    def of(edges: Edges, head: int) -> list[float]:
        places = zip(edges.rows, edges.targets, edges.sources, strict=True)
        return [score[b, head, t, s].item() for b, t, s in places]

    for head in range(4):
        expected = np.mean(of(edges, head)) - np.mean(of(placebo, head))
        assert result.advantage[head] == pytest.approx(expected, abs=1e-10)
        assert result.effect[head] == pytest.approx(expected / np.std(of(placebo, head)))
    assert result.by_pair.sum(-1) == pytest.approx(result.advantage)
