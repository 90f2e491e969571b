"""Reassigned values keep the weights of the tokens' own; swaps are described at the stated rate."""

import numpy as np
import pytest
import torch

from analysis.statistics.comparisons import westfall_young
from analysis.value_usage import (
    Swap,
    Swaps,
    force_value,
    measure_swaps,
    reorder_scores,
    shuffle_choices,
)
from analysis.value_usage.choices import find_value_layers, measure_loads, record_choices
from lab.intervals import Estimate, estimate_ratio
from lab.models import Block
from tests.unit.analysis.value_usage.models import TASK, build_model, build_subject


def test_forcing_replaces_the_last_choice_of_those_that_lack_it():
    indices = torch.tensor([[[0, 1], [2, 3], [3, 0]]])
    there = torch.tensor([[True, True, False]])
    assert force_value(indices, 1, there).tolist() == [[[0, 1], [2, 1], [3, 0]]]


def test_shuffling_keeps_every_choice():
    indices = torch.arange(24).view(2, 6, 2)
    after = shuffle_choices(indices, 0)
    assert sorted(map(tuple, after.flatten(0, 1).tolist())) == [(i, i + 1) for i in range(0, 24, 2)]
    assert not torch.equal(after, indices)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_another_choice_has_the_weights_of_the_tokens_own(k):
    scores = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    ranked = scores.argsort(dim=-1, descending=True)
    after = force_value(ranked[..., :k], 2, torch.ones(2, 5, dtype=torch.bool))
    found = reorder_scores(scores, after)
    for b, t in np.ndindex(2, 5):
        own = sorted(scores[b, t].tolist(), reverse=True)
        assert sorted(found[b, t].tolist(), reverse=True) == own
        assert [found[b, t, v].item() for v in after[b, t].tolist()] == own[:k]
    assert torch.equal(reorder_scores(scores, ranked[..., :k]), scores)


def test_swaps_are_answers_with_other_rows_of_values():
    built = build_model(retrieval="literal")
    of = build_subject(built)
    load = {i: measure_loads(c.indices, 4) for i, c in record_choices(built, of.batch).items()}
    found = measure_swaps(of, load)
    assert found.placebo == 0
    assert len(found.swaps) == 2 * (1 + 4 * 5)
    scored_at = of.batch.targets >= 0
    before = built(of.batch.inputs).argmax(-1) == of.batch.targets
    rows = next(iter(find_value_layers(built).values())).value_rows
    keep = rows.detach().clone()
    for swap in found.swaps:
        if swap.layer != 0 or swap.value is None or swap.role is not None:
            continue
        # With weights of 1, forcing a value is as good as all rows being that value's.
        rows.data[:] = keep[swap.value]
        after = built(of.batch.inputs).argmax(-1) == of.batch.targets
        rows.data[:] = keep
        change = (after[scored_at].double() - before[scored_at].double()).mean().item()
        assert swap.change.value == pytest.approx(change)


def test_a_forced_value_multiplies_with_the_weight_of_the_one_it_replaces():
    built = build_model(retrieval="softmax")
    of, layer = build_subject(built), find_value_layers(built)[0]
    name = "blocks.0.mixer.hook_value_scores"
    weight = built.run_with_cache(of.batch.inputs, name)[1][name].softmax(-1).amax(-1)
    mixtures: list[torch.Tensor] = []
    point = "blocks.0.mixer.hook_v"
    with built.hooks([(point, lambda v, _: mixtures.append(v))]):
        measure_swaps(of, {0: np.array([0.1, 0.2, 0.6, 0.1])})
    block = built.blocks[0]
    assert isinstance(block, Block)
    assert block.norm_mixer is not None
    x = block.norm_mixer(built.embed(of.batch.inputs))
    # The first passes: as it is, the placebo, shuffled, then value 2 on every token.
    expected = x * weight[..., None] * layer.value_rows[2]
    torch.testing.assert_close(mixtures[3][:, :, 0], expected, rtol=1e-4, atol=1e-5)


def test_forcing_a_value_that_is_the_same_changes_nothing():
    built = build_model(retrieval="literal")
    for layer in find_value_layers(built).values():
        layer.value_keys.data.zero_()
        layer.value_rows.data[:] = layer.value_rows.data[0]
    found = measure_swaps(
        build_subject(built), {0: np.array([1.0, 0, 0, 0]), 1: np.array([1.0, 0, 0, 0])}
    )
    assert all(swap.change.value == 0 for swap in found.swaps)
    assert all(swap.p == 1 for swap in found.swaps)


def describe_changes(changes: np.ndarray, right: float) -> str:
    """Describe n swaps by their changes of each row's accuracy [b n]."""
    rng, n_rows = np.random.default_rng(0), len(changes)
    ps = westfall_young(changes, rng)
    means = changes.mean(0).tolist()
    swaps = tuple(
        Swap(0, j or None, None, Estimate(means[j], means[j], means[j], 0.0), float(ps[j]))
        for j in range(len(means))
    )
    rights = torch.from_numpy((rng.random(n_rows) < right).astype(np.float64))
    accuracy = estimate_ratio(rights, torch.ones(n_rows), 0.03, rng)
    return Swaps(accuracy, swaps, 0.0, TASK.role_names).says


def test_null_swaps_are_said_to_cost_at_the_stated_rate():
    rng = np.random.default_rng(1)
    sentences = [describe_changes(rng.normal(size=(64, 40)) / 8, right=0.9) for _ in range(20)]
    # One of twenty is expected; more than four in less than a hundredth of such tests.
    assert sum("shown to cost accuracy: 0 of 40" not in says for says in sentences) <= 4
    assert not any("matter" in says for says in sentences)


def test_a_swap_that_costs_is_said_to():
    changes = np.random.default_rng(1).normal(size=(64, 10)) / 8
    changes[:, 3] -= 0.2
    says = describe_changes(changes, right=0.9)
    assert "shown to cost accuracy: 1 of 10; the most costly, forcing value 3 on every" in says


@pytest.mark.parametrize("shift", [0.0, -0.2])
def test_at_chance_swaps_tell_nothing(shift):
    changes = np.random.default_rng(1).normal(size=(64, 10)) / 8 + shift
    assert "swaps cannot tell which values matter" in describe_changes(changes, right=0.03)
