"""Reassigned values keep the weights of the tokens' own."""

import numpy as np
import pytest
import torch

from analysis.value_usage.reassignment import force_value, reorder_scores, shuffle_choices


def test_forcing_replaces_the_last_choice_of_those_that_lack_it():
    indices = torch.tensor([[[0, 1], [2, 3], [3, 0]]])
    there = torch.tensor([[True, True, False]])
    assert force_value(1, there)(indices).tolist() == [[[0, 1], [2, 1], [3, 0]]]


def test_shuffling_keeps_every_choice():
    indices = torch.arange(24).view(2, 6, 2)
    after = shuffle_choices(0)(indices)
    assert sorted(map(tuple, after.flatten(0, 1).tolist())) == [(i, i + 1) for i in range(0, 24, 2)]
    assert not torch.equal(after, indices)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_another_choice_has_the_weights_of_the_tokens_own(k):
    scores = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    ranked = scores.argsort(dim=-1, descending=True)
    after = force_value(2, torch.ones(2, 5, dtype=torch.bool))(ranked[..., :k])
    found = reorder_scores(scores, after)
    for b, t in np.ndindex(2, 5):
        own = sorted(scores[b, t].tolist(), reverse=True)
        assert sorted(found[b, t].tolist(), reverse=True) == own
        assert [found[b, t, v].item() for v in after[b, t].tolist()] == own[:k]
    assert torch.equal(reorder_scores(scores, ranked[..., :k]), scores)
