"""Every finding has words, a figure and a record."""

import json
from dataclasses import replace

import pytest

from analysis import value_usage
from analysis.base import NotApplicableError
from analysis.plain import to_plain
from analysis.value_usage.history import ValueHistory
from analysis.value_usage.swaps import Swaps
from analysis.value_usage.uses import ValueUses
from lab.models import build
from tests.unit.analysis.value_usage.models import (
    build_run,
    build_subject,
)


def test_history_begins_with_ties(tmp_path):
    run = build_run(tmp_path)
    results = value_usage.measure(replace(build_subject(run.load_model(2)), run=run))
    past = results[1]
    assert isinstance(past, ValueHistory)
    assert past.steps.tolist() == [0, 1, 2]
    assert past.zero_keys
    assert past.used.tolist()[:2] == [1, 1]
    assert past.ties.tolist() == [1, 1, 0]
    assert past.churn[1] == 0
    assert past.used[2] == 2
    assert past.churn[2] == pytest.approx(1 - past.shares[2, 0])
    # All took value 0 before, so that shuffling the later choices changes nothing.
    assert past.churn_dealt[2] == pytest.approx(past.churn[2])
    low, high = past.churn_interval[2]
    assert 0 < low <= past.churn[2] <= high <= 1
    says = value_usage.describe(past).says
    assert "At step 0, tokens use 1 of 4 values (e^H 1.00), because all keys are zero" in says


def test_every_finding_is_described_drawn_and_recorded(tmp_path):
    run = build_run(tmp_path)
    results = value_usage.measure(replace(build_subject(run.load_model(2)), run=run))
    assert [type(result) for result in results] == [ValueUses, ValueHistory, Swaps]
    for result in results:
        words = value_usage.describe(result)
        assert words.says.endswith(".")
        assert "nan" not in words.says + words.reading
        json.dumps(to_plain(result), allow_nan=False)
        fig = value_usage.draw(result)
        assert fig is not None
        assert fig.to_dict()["data"]


def test_many_values_and_layers_stay_readable():
    built = build("IN", vocab_size=64, d_model=16, options={"I.n_values": 40, "I.k": 3}).eval()
    uses, swaps = value_usage.measure(build_subject(built))
    assert isinstance(uses, ValueUses)
    assert isinstance(swaps, Swaps)
    [layer] = uses.layers
    assert layer.shares.sum() == pytest.approx(3)
    many = replace(uses, layers=tuple(replace(layer, layer=i) for i in range(6)))
    assert "first 4 of 6 layers" in value_usage.describe(many).reading
    assert "up to 5 per layer" in value_usage.describe(swaps).reading
    for result, panels in ((many, 4), (swaps, 1)):
        fig = value_usage.draw(result)
        assert fig is not None
        assert len({trace["yaxis"] for trace in fig.to_dict()["data"]}) == panels


def test_a_model_without_values_is_not_measured():
    with pytest.raises(NotApplicableError, match="no block looks its values up"):
        value_usage.measure(build_subject(build("AM", vocab_size=64, d_model=16).eval()))
