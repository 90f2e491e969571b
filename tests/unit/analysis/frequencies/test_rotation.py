"""Frequencies add up to the scores of the layers, and means equal loops over pairs."""

import math

import numpy as np
import pytest
import torch

from analysis.frequencies.energies import measure_spectrum
from analysis.frequencies.rotation import (
    average_by_lag,
    average_causal_pairs,
    measure_rotated_sides,
)
from tests.unit.analysis.frequencies.models import CASES, build_subject, score_directly


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
    size, product = average_causal_pairs(found)
    sizes, products = [], []
    for b in range(3):
        for t in range(16):
            for s in range(t + 1):
                z = found.q[b, t].conj() * found.k[b, s]
                sizes.append(z.abs().numpy())
                products.append(z.numpy())
    np.testing.assert_allclose(size, np.mean(sizes, 0))
    np.testing.assert_allclose(product, np.mean(products, 0), atol=1e-12)
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
        given.model, given.batch, lambda r: (*average_causal_pairs(r), *average_by_lag(r, lags))
    )
    monkeypatch.setattr("analysis.frequencies.rotation.BLOCK_ENTRIES", 1)
    [parts] = measure_rotated_sides(
        given.model, given.batch, lambda r: (*average_causal_pairs(r), *average_by_lag(r, lags))
    )
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
