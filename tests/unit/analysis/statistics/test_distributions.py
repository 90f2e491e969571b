"""Concentration and information against explicit loops, at their extremes, and unmoved by order."""

import math

import numpy as np
import pytest

from analysis.statistics import distributions as d

MEASURES = (d.entropy, d.effective_number, d.kl_to_uniform, d.gini)
rng = np.random.default_rng(0)
LOADS = rng.gamma(0.3, size=(5, 3, 12))
COUNTS = rng.integers(0, 9, size=(6, 11))
ROUNDING = 1e-12
"""Sums of a dozen doubles."""


def looped(name: str, p: list[float]) -> float:
    n = len(p)
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    return {
        "entropy": entropy,
        "effective_number": math.exp(entropy),
        "kl_to_uniform": sum(x * math.log(x * n) for x in p if x > 0),
        "gini": sum(abs(x - y) for x in p for y in p) / (2 * n),
    }[name]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("load", [LOADS, COUNTS])
def test_measures_are_their_loops(measure, load):
    found = measure(load)
    assert found.shape == load.shape[:-1]
    for at in np.ndindex(found.shape):
        p = [float(x) for x in load[at] / load[at].sum()]
        assert found[at] == pytest.approx(looped(measure.__name__, p), abs=ROUNDING)


@pytest.mark.parametrize("n", [1, 2, 7, 1024])
def test_extremes(n):
    uniform, single = np.ones(n), np.eye(n)[n // 2]
    ends = [(float(measure(uniform)), float(measure(single))) for measure in MEASURES]
    expected = [(math.log(n), 0), (n, 1), (0, math.log(n)), (0, 1 - 1 / n)]
    np.testing.assert_allclose(ends, expected, rtol=1e-12, atol=ROUNDING)
    assert d.coverage(single, 0.99) == 1
    assert d.coverage(uniform, 1.0) == n
    assert min(min(pair) for pair in ends) >= 0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99, 1.0])
def test_coverage_is_the_loop(share):
    for load in COUNTS:
        held, fewest = 0, 0
        # Counts are whole numbers: the loop decides ties exactly.
        for count in sorted(load.tolist(), reverse=True):
            if held >= round(share * 100) * load.sum() / 100:
                break
            held, fewest = held + count, fewest + 1
        assert d.coverage(load, share) == fewest


@pytest.mark.parametrize("measure", [*MEASURES, lambda load: d.coverage(load, 0.5)])
def test_no_load_is_no_distribution(measure):
    found = measure(np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert np.isnan(found).tolist() == [True, False]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"load=-1.*≥ 0"):
        d.entropy(np.array([1, -1]))
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"share={share}"):
            d.coverage(np.ones(3), share)


def test_joint_counts_are_the_loop():
    x, y = rng.integers(5, size=(40, 2, 3)), rng.integers(3, size=40)
    expected = np.zeros((5, 3), int)
    for i in range(40):
        for label in x[i].ravel():
            expected[label, y[i]] += 1
    np.testing.assert_array_equal(d.count_joint(x, y), expected)
    np.testing.assert_array_equal(d.count_joint(x[:, 0, 0], y), d.count_joint(x[:, :1, 0], y))


@pytest.mark.parametrize("counts", [COUNTS, COUNTS[:, :1], np.eye(4, dtype=int)])
def test_mutual_information_is_the_loop(counts):
    total = counts.sum()
    expected = 0.0
    for i, j in np.ndindex(counts.shape):
        if counts[i, j]:
            p = counts[i, j] / total
            expected += p * math.log(p * total**2 / (counts[i].sum() * counts[:, j].sum()))
    found = d.mutual_information(counts)
    assert found == pytest.approx(expected, abs=ROUNDING)
    assert found == pytest.approx(d.mutual_information(counts.T), abs=ROUNDING)


def test_miller_madow_takes_the_bias_away():
    """Unrelated labels: plug-in is (n_x − 1)(n_y − 1)/2N too large, the corrected one unbiased."""
    n, n_x, n_y, rounds = 400, 8, 5, 300
    tables = [
        d.count_joint(rng.integers(n_x, size=n), rng.integers(n_y, size=n)) for _ in range(rounds)
    ]
    plug_in = np.array([d.mutual_information(table) for table in tables])
    corrected = np.array([d.miller_madow(table) for table in tables])
    bias = (n_x - 1) * (n_y - 1) / (2 * n)
    # 4 standard errors, and the next order of the bias, about 1 % of it here.
    tolerance = 4 * plug_in.std() / math.sqrt(rounds) + 0.02 * bias
    assert plug_in.mean() == pytest.approx(bias, abs=tolerance)
    assert corrected.mean() == pytest.approx(0, abs=tolerance)


def test_the_null_holds_what_is_unrelated_and_not_what_is_related():
    y = rng.integers(4, size=300)
    unrelated, related = rng.integers(6, size=300), (y + (rng.random(300) < 0.3)) % 4
    beyond = []
    for x in (unrelated, related):
        null = d.permutation_null(x, y, np.random.default_rng(1), rounds=200)
        assert null.shape == (200,)
        beyond.append((null >= d.mutual_information(d.count_joint(x, y))).mean())
    assert beyond[0] > 0.01
    assert beyond[1] == 0


def test_choices_made_at_once_are_shuffled_at_once():
    """Ten copies of a label are one choice: the null must be that of one, not of ten."""
    x, y = rng.integers(6, size=100), rng.integers(4, size=100)
    copies = np.repeat(x[:, None], 10, axis=1)
    once = d.permutation_null(x, y, np.random.default_rng(1), rounds=20)
    np.testing.assert_allclose(
        d.permutation_null(copies, y, np.random.default_rng(1), rounds=20), once, atol=ROUNDING
    )
