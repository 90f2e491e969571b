"""Frequencies add up to the scores of layers and edges, and means equal loops over pairs."""

import math

import numpy as np
import pytest
import torch

from analysis.frequencies.rotation import (
    average_by_lag,
    average_sizes,
    link_edges,
    measure_rotated_sides,
    sample_edges,
    sample_placebo,
)
from analysis.frequencies.spectra import measure_spectrum
from tests.unit.analysis.frequencies.models import CASES, TASK, build_subject, score_directly


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_frequencies_add_up_to_the_score_of_rotated_vectors(case):
    stack, options = CASES[case]
    given = build_subject(stack, options)
    [(found, parts, decays, decayed)] = measure_rotated_sides(
        given.model, given.batch, lambda r: (r, *average_by_lag(r, np.array([0, 1, 5, 15])))
    )
    score, log_decay = score_directly(found, given.model, given.batch)
    for i, lag in enumerate([0, 1, 5, 15]):
        for h, c in enumerate(found.groups):
            raw, faded, kept = [], [], []
            for b in range(3):
                for t in range(lag, 16):
                    decay = 1.0
                    for k in range(t - lag + 1, t + 1):
                        decay *= 1.0 if log_decay is None else math.exp(log_decay[b, k, h].item())
                    raw.append(score[b, h, t, t - lag].item())
                    kept.append(decay)
                    faded.append(raw[-1] * decay)
            # fp64, but for the layer's table of angles, which is exact to its rounding.
            assert parts[i, c].sum() == pytest.approx(np.mean(raw), abs=1e-10)
            assert decays[i, h] == pytest.approx(np.mean(kept), abs=1e-10)
            assert decayed[i, h] == pytest.approx(np.mean(faded), abs=1e-10)


@torch.no_grad()
def test_causal_means_are_loops_over_pairs():
    given = build_subject("AM")
    [found] = measure_rotated_sides(given.model, given.batch, lambda r: r)
    size = average_sizes(found)
    sizes = []
    for b in range(3):
        for t in range(16):
            for s in range(t + 1):
                z = found.q[b, t].conj() * found.k[b, s]
                sizes.append(z.abs().numpy())
    np.testing.assert_allclose(size, np.mean(sizes, 0))
    result = measure_spectrum(found)
    np.testing.assert_allclose(result.share, size / size.sum(-1, keepdims=True))
    np.testing.assert_allclose(result.share.sum(-1), 1)
    for c in range(4):
        entropy = -sum(p * math.log(p) for p in result.share[c])
        assert result.effective[c] == pytest.approx(math.exp(entropy))
        long = sum(result.share[c, m] for m in range(4) if 2 * math.pi / found.theta[m] > 16)
        assert result.long[c] == pytest.approx(long)


def test_blocks_of_rows_change_nothing(monkeypatch):
    given = build_subject("SM", {"S.d_state": 8})
    lags = np.array([1, 4])
    [whole] = measure_rotated_sides(
        given.model, given.batch, lambda r: (average_sizes(r), *average_by_lag(r, lags))
    )
    monkeypatch.setattr("analysis.frequencies.rotation.BLOCK_ENTRIES", 1)
    [parts] = measure_rotated_sides(
        given.model, given.batch, lambda r: (average_sizes(r), *average_by_lag(r, lags))
    )
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_a_placebo_has_the_lags_and_rows_of_its_edges():
    batch = TASK.batch(split="test", size=64)
    edges = link_edges(batch, "value_pos", "key_pos")
    placebo = sample_placebo(edges, 16, np.random.default_rng(0))
    assert torch.equal(placebo.lags, edges.lags)
    assert torch.equal(placebo.rows, edges.rows)
    assert placebo.sources.min() == 0
    assert placebo.targets.max() == 15


def test_causal_edges_are_all_as_likely():
    batch = TASK.batch(split="test", size=2)
    count = 200_000
    edges = sample_edges(batch, count, np.random.default_rng(0))
    seen = np.zeros((2, 16, 16))
    np.add.at(seen, tuple(part.numpy() for part in vars(edges).values()), 1)
    lower = np.tri(16, dtype=bool)
    assert (seen[:, ~lower] == 0).all()
    expected = count / (2 * lower.sum())
    # A count's standard deviation is near √735 = 27; six of them among 272.
    assert np.abs(seen[:, lower] - expected).max() < 6 * math.sqrt(expected)
