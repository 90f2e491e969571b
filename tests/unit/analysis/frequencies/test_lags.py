"""Planted lags are found, with the frequencies behind them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.frequencies.lags import (
    TOO_FEW,
    FrequenciesByLag,
    find_peak,
    measure_lag_curves,
)
from analysis.frequencies.rotation import sample_answers
from tasks.mqar import MQAR
from tests.unit.analysis.frequencies.models import (
    TASK,
    plant_product,
)


@pytest.mark.parametrize("lag", [1, 3])
def test_a_planted_lag_is_where_the_score_peaks(lag):
    theta = 100.0 ** -(np.arange(8) / 8)
    rotation = plant_product(np.exp(1j * lag * theta), theta, rows=20)
    batch = TASK.batch(split="test", size=20)
    rng = np.random.default_rng(0)
    result = measure_lag_curves(rotation, sample_answers(batch, rng), batch, rng)
    assert result.lags[result.score[:, 0].argmax()] == lag
    expected = [sum(math.cos((other - lag) * angle) for angle in theta) for other in result.lags]
    np.testing.assert_allclose(result.score[:, 0], expected)
    # Whatever is carried to a lag has the score of all that stand at it: the content is constant.
    np.testing.assert_allclose(result.carried["value → key"], result.score)
    assert result.pairs.tolist() == [20 * (16 - other) for other in result.lags]


@pytest.mark.parametrize(("turn", "prefers"), [(1e-6, False), (1e-1, True)])
def test_scores_that_lags_part_by_rounding_alone_prefer_none(turn: float, prefers: bool):
    """Pairs that turn by 1e-6 a token fall by 1e-10 of the score within a row."""
    batch = TASK.batch(split="test", size=40)
    rotation = plant_product(np.ones(8), np.full(8, turn), rows=40)
    found = measure_lag_curves(rotation, {}, batch, np.random.default_rng(0))
    assert (find_peak(found) is not None) == prefers


@pytest.mark.parametrize("seq_len", [4, 16, 600])
def test_lags_are_within_the_row(seq_len):
    batch = MQAR(seq_len=seq_len, n_pairs=1, vocab_size=2048).batch(size=1)
    sides = plant_product(np.ones(1), np.ones(1), seq_len=seq_len, rows=1)
    lags = measure_lag_curves(sides, {}, batch, np.random.default_rng(0)).lags
    assert lags[0] == 1
    assert lags[-1] == seq_len - 1
    assert (np.diff(lags) > 0).all()


def test_a_peak_names_the_fewest_frequencies_behind_it():
    theta = 100.0 ** -(np.arange(8) / 8)
    weight = np.array([0, 0, 3.0, 2, 0.5, 0, 0, 0])
    batch = TASK.batch(split="test", size=20)
    rotation = plant_product(weight * np.exp(1j * theta), theta, rows=20)
    found = measure_lag_curves(rotation, {}, batch, np.random.default_rng(0))
    peak = find_peak(found)
    assert peak is not None
    assert peak.lag == 1
    added = sorted(found.by_pair[0, 0], reverse=True)
    count = next(n for n in range(1, 9) if sum(added[:n]) >= found.rise[0, 0] / 2)
    assert peak.count == count <= 2
    waves = 2 * math.pi / theta
    assert waves[2] <= peak.wavelengths[0] <= peak.wavelengths[1] <= waves[3]
    table = FrequenciesByLag((found,), (peak,)).numbers()
    assert table is not None
    assert f"{count} of 8" in table.rows[0]
    few = replace(found, pairs=found.pairs // 20)
    assert find_peak(few) is None
    untold = FrequenciesByLag((few,), ())
    assert untold.says == TOO_FEW
    assert untold.figure() is None
