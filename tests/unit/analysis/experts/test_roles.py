"""What choices tell about roles: all of it where planted, nothing where there is nothing."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.base import NotApplicableError, Subject
from analysis.experts.roles import (
    RolePreferences,
    measure,
    measure_preferences,
)
from analysis.plain import to_plain
from lab.models import build
from tasks.mqar import MQAR
from tests.unit.analysis.cases.experts import choose

TASK = MQAR(seq_len=16, vocab_size=32)
ROLES = np.random.default_rng(0).integers(4, size=600)


def of(*layers: np.ndarray, names=("key", "value", "query", "filler"), seed=0) -> RolePreferences:
    return measure_preferences([choose(indices, 12) for indices in layers], ROLES, names, seed)


def test_a_planted_expert_of_each_role_tells_all_of_it():
    # Head 0 and head 1 have experts of their own for each role.
    result = of(np.stack([ROLES, 4 + ROLES], axis=1)[..., None])
    (layer,) = result.layers
    assert layer.information == pytest.approx(result.uncertainty)
    assert result.p_value == 0.01
    assert (layer.shares.max(axis=1) == 1).all()
    assert layer.shares[0].argmax() == layer.experts[0] % 4
    assert result.numbers().rows[0][3].startswith("100.0 %")


def test_an_expert_that_avoids_the_commonest_role_is_not_named_by_it():
    """Expert 0 has every “c”, a fifth of the tokens; 300 of its 500 choices are “a”."""
    roles = np.repeat([0, 2], [800, 200])
    experts = np.where((roles == 2) | (np.arange(1000) < 300), 0, 1 + np.arange(1000) % 10)
    found = measure_preferences([choose(experts[:, None, None], 11)], roles, ("a", "b", "c"), 0)
    assert found.numbers().rows[0][2:] == ("0", "40.0 % c", "20.0 %")


def test_choices_without_a_role_are_not_said_to_have_one():
    indices = np.random.default_rng(1).integers(12, size=(600, 2, 1))
    result = of(indices)
    assert result.p_value > 0.05


def test_of_many_layers_the_best_is_held_to_the_best_by_chance(monkeypatch):
    """Eight layers that know nothing: a claim in 1 of 20; each by itself makes it in 1 of 3."""
    monkeypatch.setattr("analysis.experts.roles.ROUNDS", 39)
    told = []
    for seed in range(16):
        layers = np.random.default_rng(seed).integers(12, size=(8, 600, 2, 1))
        told.append(of(*layers, seed=seed).p_value <= 0.05)
    assert sum(told) <= 2


def test_a_layer_that_tells_is_found_among_many_that_do_not():
    layers = list(np.random.default_rng(5).integers(12, size=(8, 600, 1, 1)))
    knows = np.random.default_rng(6).random(600) < 0.2
    layers[3][knows, 0, 0] = ROLES[knows]
    result = of(*layers)
    assert result.p_value == 0.01
    assert max(result.layers, key=lambda one: one.information) is result.layers[3]


def test_a_sample_of_many_tokens_tells_the_same(monkeypatch):
    rng = np.random.default_rng(3)
    indices = np.where(rng.random((600, 1, 2)) < 0.7, ROLES[:, None, None], rng.integers(12))
    (whole,) = of(indices).layers
    monkeypatch.setattr("analysis.experts.roles.DRAWS", 600)
    (part,) = of(indices).layers
    assert part.information != whole.information
    # 300 tokens: the share of a role is known to about 3 points.
    assert part.information == pytest.approx(whole.information, rel=0.2)


@pytest.mark.parametrize(("stack", "layers"), [("AE", 1), ("AR AX", 2), ("NX*9", 9)])
def test_a_model_has_a_figure_and_words(stack, layers):
    model = build(stack, vocab_size=32, d_model=16, seed=0).eval()
    (result,) = measure(Subject(TASK, model, TASK.batch(split="test", size=8)))
    json.dumps(to_plain(result), allow_nan=False)
    assert len(result.layers) == layers
    bars: list[Any] = list(result.figure().select_traces())
    total = np.sum([bar.x for bar in bars], axis=0)
    # Empty lines separate the layers.
    np.testing.assert_allclose(total[~np.isnan(total)], 1)
    assert np.isnan(total).sum() == min(layers, 8)


def test_where_there_is_nothing_to_tell():
    batch = TASK.batch(split="test", size=2)
    with pytest.raises(NotApplicableError, match="no block chooses among experts"):
        measure(Subject(TASK, build("AM", vocab_size=32, d_model=16).eval(), batch))
    model = build("AR", vocab_size=32, d_model=16).eval()
    with pytest.raises(NotApplicableError, match="same role"):
        measure(Subject(TASK, model, replace(batch, roles=batch.roles * 0)))
