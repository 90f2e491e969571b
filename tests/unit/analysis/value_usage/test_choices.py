"""Choices, loads, margins and churn equal loops over tokens."""

from itertools import permutations

import numpy as np
import pytest

from analysis.value_usage.choices import (
    expect_churn,
    measure_churn,
    measure_loads,
    measure_margins,
    record_choices,
)
from tasks.mqar import VALUE
from tests.unit.analysis.value_usage.models import ROLES, TASK, build_model


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
    assert measure_churn(before, before) == 0
    assert measure_churn(before, after) == pytest.approx(1 / 3)


def test_expected_churn_is_the_mean_over_all_orders():
    rng = np.random.default_rng(0)
    before, after = (rng.integers(0, 3, (1, 5, 2)) for _ in range(2))
    orders = [list(order) for order in permutations(range(5))]
    expected = np.mean([measure_churn(before, after[:, order]) for order in orders])
    assert expect_churn(before, after) == pytest.approx(expected)


def test_roles_that_are_not_there_are_no_number():
    assert np.isnan(measure_loads(np.zeros((0, 2), np.int64), 4)).all()
    assert (ROLES == VALUE).any()
