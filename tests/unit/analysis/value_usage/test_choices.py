"""Choices are the layers' own, planted ones are measured as what they are, a history as it went."""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from analysis import value_usage
from analysis.base import NotApplicableError
from analysis.value_usage.choices import (
    LayerUsage,
    ValueChoices,
    ValueHistory,
    ValueUses,
    expect_churn,
    find_changed,
    measure_loads,
    measure_margins,
    measure_usage,
    record_choices,
)
from lab.models import build
from tests.unit.analysis.value_usage.models import (
    ROLES,
    TASK,
    build_model,
    build_run,
    build_subject,
)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_choices_and_margins_are_the_layers_own(k):
    built = build_model(k=k)
    batch = TASK.batch(split="test", size=3)
    found = record_choices(built, batch)[1]
    gaps = measure_margins(found)
    assert gaps.size == (0 if k == 4 else 3 * 16)
    counts = np.zeros(4)
    for i, (b, t) in enumerate(np.ndindex(3, 16)):
        order = sorted(range(4), key=lambda v: (-found.scores[b, t, v], v))
        assert found.indices[b, t].tolist() == order[:k]
        for value in order[:k]:
            counts[value] += 1
        if k < 4:
            ranked = found.scores[b, t, order]
            assert gaps[i] == ranked[k - 1] - ranked[k]
    np.testing.assert_allclose(measure_loads(found.indices, 4), counts / 48)


def test_a_set_churns_only_when_its_members_do():
    before = np.array([[[0, 1], [2, 3], [1, 2]]])
    after = np.array([[[1, 0], [2, 0], [1, 2]]])
    assert not find_changed(before, before).any()
    assert find_changed(before, after).tolist() == [[False, True, False]]


def test_expected_churn_is_the_mean_over_all_orders():
    rng = np.random.default_rng(0)
    before, after = (rng.integers(0, 3, (1, 5, 2)) for _ in range(2))
    orders = [list(order) for order in permutations(range(5))]
    expected = np.mean([find_changed(before, after[:, order]) for order in orders])
    assert expect_churn(before, after) == pytest.approx(expected)


def measure_planted(indices: np.ndarray, n_values: int = 4) -> LayerUsage:
    """Measure these choices [b t], with scores that rank the chosen first by a margin of 1."""
    scores = np.zeros((*indices.shape, n_values), np.float32)
    np.put_along_axis(scores, indices[..., None], 1.0, -1)
    chosen = ValueChoices(indices[..., None], scores)
    return measure_usage(0, chosen, ROLES, 4, np.random.default_rng(0))


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


def test_a_choice_by_band_tells_the_band():
    band = np.broadcast_to(np.arange(16) * 8 // 16, ROLES.shape)
    found = measure_planted(band.copy(), n_values=8)
    assert found.band.information == pytest.approx(math.log(8))


def test_one_value_for_all_is_one_value():
    found = measure_planted(np.full(ROLES.shape, 2))
    assert (found.used, found.effective, found.role.information) == (1, 1, 0)
    assert found.kl == pytest.approx(math.log(4))
    assert found.gini == pytest.approx(0.75)


def test_zero_keys_tie_and_choose_one_value():
    options = {"I.n_values": 4, "I.key_init": "zeros"}
    built = build("IN", vocab_size=64, d_model=16, options=options).eval()
    uses = value_usage.measure(build_subject(built))[0]
    assert isinstance(uses, ValueUses)
    for layer in uses.layers:
        assert (layer.ties, layer.used, layer.effective) == (1, 1, 1)
        assert layer.margin == 0


def test_history_begins_with_ties(tmp_path):
    run = build_run(tmp_path)
    results = value_usage.measure(replace(build_subject(run.load_model(2)), run=run))
    past = results[1]
    assert isinstance(past, ValueHistory)
    assert past.steps.tolist() == [0, 1, 2]
    assert past.used.tolist()[:2] == [1, 1]
    assert past.ties.tolist() == [1, 1, 0]
    assert past.churn[1] == 0
    assert past.used[2] == 2
    assert past.churn[2] == pytest.approx(1 - past.shares[2, 0])
    # All took value 0 before, so that shuffling the later choices changes nothing.
    assert past.churn_dealt[2] == pytest.approx(past.churn[2])
    low, high = past.churn_interval[2]
    assert 0 < low <= past.churn[2] <= high <= 1


def test_a_model_without_values_is_not_measured():
    with pytest.raises(NotApplicableError, match="no block looks its values up"):
        value_usage.measure(build_subject(build("AM", vocab_size=64, d_model=16).eval()))
