"""Planted choices are measured as what they are."""

import math

import numpy as np
import pytest

from analysis import value_usage
from analysis.value_usage.choices import (
    ValueChoices,
)
from analysis.value_usage.uses import LayerUsage, ValueUses, measure_usage
from lab.layers.inner_function import InnerFunctionAttention
from lab.models import build
from tests.unit.analysis.value_usage.models import ROLES, build_model, build_subject


def measure_planted(indices: np.ndarray, n_values: int = 4) -> LayerUsage:
    """Measure these choices [b t], with scores that rank the chosen first by a margin of 1."""
    scores = np.zeros((*indices.shape, n_values), np.float32)
    np.put_along_axis(scores, indices[..., None], 1.0, -1)
    module = build_model().blocks[0].mixer
    assert isinstance(module, InnerFunctionAttention)
    chosen = ValueChoices(indices[..., None], scores)
    return measure_usage(0, module, chosen, ROLES, 4, np.random.default_rng(0))


def test_uniform_choice_is_uniform():
    found = measure_planted(np.arange(ROLES.size).reshape(ROLES.shape) % 4)
    assert found.used == 4
    assert found.effective == pytest.approx(4)
    assert found.kl == pytest.approx(0, abs=1e-12)
    assert found.gini == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(found.shares, 0.25)


def test_a_choice_by_role_tells_the_whole_role():
    found = measure_planted(ROLES)
    share = np.bincount(ROLES.ravel()) / ROLES.size
    entropy = -(share * np.log(share)).sum()
    assert found.role.information == pytest.approx(entropy)
    assert found.role.bound == pytest.approx(entropy)
    assert found.role.shows
    np.testing.assert_allclose(found.by_role, np.eye(4))


def test_a_choice_at_random_tells_nothing():
    found = measure_planted(np.random.default_rng(3).integers(0, 4, ROLES.shape))
    assert not found.role.shows
    assert abs(found.role.corrected) < found.role.information
    assert found.role.null == pytest.approx(9 / (2 * ROLES.size), rel=0.2)


def test_a_choice_by_band_tells_the_band():
    band = np.broadcast_to(np.arange(16) * 8 // 16, ROLES.shape)
    found = measure_planted(band.copy(), n_values=8)
    assert found.band.information == pytest.approx(math.log(8))


def test_one_value_for_all_is_one_value():
    found = measure_planted(np.full(ROLES.shape, 2))
    assert (found.used, found.effective, found.role.information) == (1, 1, 0)
    assert found.kl == pytest.approx(math.log(4))
    assert found.gini == pytest.approx(0.75)


def test_what_a_label_can_tell_is_bounded_by_the_lesser_entropy():
    found = measure_planted(ROLES % 2)
    share = np.bincount(ROLES.ravel() % 2) / ROLES.size
    entropy = -(share * np.log(share)).sum()
    assert found.role.information == pytest.approx(entropy)
    assert found.role.bound == pytest.approx(entropy)


def test_zero_keys_tie_and_choose_one_value():
    options = {"I.n_values": 4, "I.key_init": "zeros"}
    built = build("IN", vocab_size=64, d_model=16, options=options).eval()
    uses = value_usage.measure(build_subject(built))[0]
    assert isinstance(uses, ValueUses)
    for layer in uses.layers:
        assert (layer.ties, layer.used, layer.effective) == (1, 1, 1)
        assert (layer.margins == 0).all()
    says = value_usage.describe(uses).says
    assert "Layer 0 uses 1 of 4 values (e^H 1.00): the scores of every token tie" in says
