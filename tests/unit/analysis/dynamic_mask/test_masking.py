"""Onsets, readers and AUROC equal loops over queries and keys."""

import numpy as np
import pytest
import torch

from analysis.dynamic_mask.masks import auroc, count_readers, find_onsets
from lab.ops.attention import MASKED
from tests.unit.analysis.dynamic_mask.models import find_masked_by_loop


def random_biases(seed: int, window: int | None):
    generator = torch.Generator().manual_seed(seed)
    bias = 4 * torch.randn(2, 3, 12, generator=generator)
    bias[0, 0] = 0.0
    bias[0, 1, :5] = MASKED
    bias[1, 2] = MASKED
    return bias


@pytest.mark.parametrize("window", [None, 1, 3, 12, 20])
def test_a_key_is_masked_from_its_onset_on(window):
    bias = random_biases(0, window)
    found = find_onsets(bias, window)
    for b, h in np.ndindex(2, 3):
        masked = find_masked_by_loop(bias[b, h].double().tolist(), window)
        for s in range(12):
            for t in range(s, 12):
                assert masked[t, s] == (found[b, h, s] <= t)


def test_readers_are_counted_as_the_loop_counts_them():
    bias = random_biases(1, 4)
    asking = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    kept, eligible = count_readers(find_onsets(bias, 4), asking)
    for b, h in np.ndindex(2, 3):
        masked = find_masked_by_loop(bias[b, h].double().tolist(), 4)
        for s in range(12):
            queries = [t for t in range(s, 12) if asking[b, t]]
            assert eligible[b, s] == len(queries)
            assert kept[b, h, s] == sum(not masked[t, s] for t in queries)


def test_auroc_is_the_share_of_pairs_won():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(0, 5, (3, 9)).astype(np.float64))
    positive = torch.from_numpy(rng.integers(0, 3, (3, 9)))
    negative = torch.from_numpy(rng.integers(0, 3, (3, 9)))
    found = auroc(values, positive, negative)
    for b in range(3):
        won = 0.0
        for i, j in np.ndindex(9, 9):
            tie = 0.5 * float(values[b, i] == values[b, j])
            won += float(positive[b, i] * negative[b, j]) * (
                float(values[b, i] > values[b, j]) + tie
            )
        expected = won / float(positive[b].sum() * negative[b].sum())
        assert float(found[b]) == pytest.approx(expected)
    assert auroc(torch.zeros(4), torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 1])) == 0.5
