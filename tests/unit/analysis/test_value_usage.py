"""Planted choices are found for what they are; every number is the loop over tokens."""

import json
import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from analysis import value_usage
from analysis.base import NotApplicableError, Subject
from analysis.record import to_plain
from analysis.statistics.estimates import Estimate, estimate_ratio, westfall_young
from analysis.value_usage.choices import (
    Choices,
    Past,
    Usage,
    choices,
    churn,
    churn_if_dealt,
    loads,
    margins,
    usage,
    value_layers,
)
from analysis.value_usage.swaps import Swap, Swaps, dealt, forced, handed_on, measure_swaps
from analysis.value_usage.words import Uses
from lab.config import ModelConfig, TrainConfig
from lab.layers.inner_function import InnerFunctionAttention
from lab.models import Block, LanguageModel, build
from lab.training.runs import Run
from tasks.mqar import MQAR, VALUE

TASK = MQAR(seq_len=16, vocab_size=64)
ROLE_NAMES = TASK.role_names
ROLES = TASK.batch(split="test", size=8).roles.numpy()


def model(**options) -> LanguageModel:
    given = {"I.n_values": 4, **{f"I.{name}": value for name, value in options.items()}}
    return build("IM*2", vocab_size=64, d_model=16, options=given, seed=1).eval()


def subject(built: LanguageModel, rows: int = 8, run: Run | None = None) -> Subject:
    return Subject(TASK, built, TASK.batch(split="test", size=rows), run=run)


def measured(indices: np.ndarray, n_values: int = 4) -> Usage:
    """What is found of these choices [b t]; scores rank the chosen first by a margin of 1."""
    scores = np.zeros((*indices.shape, n_values), np.float32)
    np.put_along_axis(scores, indices[..., None], 1.0, -1)
    module = model().blocks[0].mixer
    assert isinstance(module, InnerFunctionAttention)
    chosen = Choices(indices[..., None], scores)
    return usage(0, module, chosen, ROLES, 4, np.random.default_rng(0))


def test_uniform_choice_is_uniform():
    found = measured(np.arange(ROLES.size).reshape(ROLES.shape) % 4)
    assert found.used == 4
    assert found.effective == pytest.approx(4)
    assert found.kl == pytest.approx(0, abs=1e-12)
    assert found.gini == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(found.shares, 0.25)


def test_a_choice_by_role_tells_the_whole_role():
    found = measured(ROLES)
    share = np.bincount(ROLES.ravel()) / ROLES.size
    entropy = -(share * np.log(share)).sum()
    assert found.role.information == pytest.approx(entropy)
    assert found.role.bound == pytest.approx(entropy)
    assert found.role.shows
    np.testing.assert_allclose(found.by_role, np.eye(4))


def test_a_choice_at_random_tells_nothing():
    found = measured(np.random.default_rng(3).integers(0, 4, ROLES.shape))
    assert not found.role.shows
    assert abs(found.role.corrected) < found.role.information
    assert found.role.null == pytest.approx(9 / (2 * ROLES.size), rel=0.2)


def test_a_choice_by_band_tells_the_band():
    band = np.broadcast_to(np.arange(16) * 8 // 16, ROLES.shape)
    found = measured(band.copy(), n_values=8)
    assert found.band.information == pytest.approx(math.log(8))


def test_one_value_for_all_is_one_value():
    found = measured(np.full(ROLES.shape, 2))
    assert (found.used, found.effective, found.role.information) == (1, 1, 0)
    assert found.kl == pytest.approx(math.log(4))
    assert found.gini == pytest.approx(0.75)


def test_zero_keys_tie_and_choose_one_value():
    options = {"I.n_values": 4, "I.key_init": "zeros"}
    built = build("IN", vocab_size=64, d_model=16, options=options).eval()
    uses = value_usage.measure(subject(built))[0]
    assert isinstance(uses, Uses)
    for layer in uses.layers:
        assert (layer.ties, layer.used, layer.effective) == (1, 1, 1)
        assert (layer.margins == 0).all()
    says = value_usage.describe(uses).says
    assert "Layer 0 uses 1 of 4 values (e^H 1.00): the scores of every token tie" in says


@pytest.mark.parametrize("k", [1, 2, 4])
def test_choices_and_margins_are_the_layers_own(k):
    built = model(k=k)
    batch = TASK.batch(split="test", size=3)
    found = choices(built, batch)[1]
    gaps = margins(found)
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
    np.testing.assert_allclose(loads(found.indices, 4), counts / 48)


def test_a_set_churns_only_when_its_members_do():
    before = np.array([[[0, 1], [2, 3], [1, 2]]])
    after = np.array([[[1, 0], [2, 0], [1, 2]]])
    assert churn(before, before) == 0
    assert churn(before, after) == pytest.approx(1 / 3)


def test_churn_if_dealt_is_the_mean_over_all_orders():
    rng = np.random.default_rng(0)
    before, after = (rng.integers(0, 3, (1, 5, 2)) for _ in range(2))
    orders = [list(order) for order in permutations(range(5))]
    expected = np.mean([churn(before, after[:, order]) for order in orders])
    assert churn_if_dealt(before, after) == pytest.approx(expected)


def test_what_a_label_can_tell_is_bounded_by_the_lesser_entropy():
    found = measured(ROLES % 2)
    share = np.bincount(ROLES.ravel() % 2) / ROLES.size
    entropy = -(share * np.log(share)).sum()
    assert found.role.information == pytest.approx(entropy)
    assert found.role.bound == pytest.approx(entropy)


def test_forcing_replaces_the_last_choice_of_those_that_lack_it():
    indices = torch.tensor([[[0, 1], [2, 3], [3, 0]]])
    there = torch.tensor([[True, True, False]])
    assert forced(1, there)(indices).tolist() == [[[0, 1], [2, 1], [3, 0]]]


def test_dealing_keeps_every_choice():
    indices = torch.arange(24).view(2, 6, 2)
    after = dealt(0)(indices)
    assert sorted(map(tuple, after.flatten(0, 1).tolist())) == [(i, i + 1) for i in range(0, 24, 2)]
    assert not torch.equal(after, indices)


def test_swaps_are_answers_with_other_rows_of_values():
    built = model(retrieval="literal")
    of = subject(built)
    load = {i: loads(c.indices, 4) for i, c in choices(built, of.batch).items()}
    found = measure_swaps(of, load)
    assert found.placebo == 0
    assert len(found.swaps) == 2 * (1 + 4 * 5)
    scored_at = of.batch.targets >= 0
    before = built(of.batch.inputs).argmax(-1) == of.batch.targets
    rows = next(iter(value_layers(built).values())).value_rows
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
        assert swap.moved == pytest.approx(1 - load[0][swap.value])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_another_choice_has_the_weights_of_the_tokens_own(k):
    scores = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    ranked = scores.argsort(dim=-1, descending=True)
    after = forced(2, torch.ones(2, 5, dtype=torch.bool))(ranked[..., :k])
    found = handed_on(scores, after)
    for b, t in np.ndindex(2, 5):
        own = sorted(scores[b, t].tolist(), reverse=True)
        assert sorted(found[b, t].tolist(), reverse=True) == own
        assert [found[b, t, v].item() for v in after[b, t].tolist()] == own[:k]
    assert torch.equal(handed_on(scores, ranked[..., :k]), scores)


def test_a_forced_value_multiplies_with_the_weight_of_the_one_it_replaces():
    built = model(retrieval="softmax")
    of, layer = subject(built), value_layers(built)[0]
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
    # The first passes: as it is, the placebo, dealt at random, then value 2 on every token.
    expected = x * weight[..., None] * layer.value_rows[2]
    torch.testing.assert_close(mixtures[3][:, :, 0], expected, rtol=1e-4, atol=1e-5)


def recaller() -> LanguageModel:
    """A model whose layer 0 answers from the values' rows: value 1 spoils what value 0 gives."""
    built = model(retrieval="literal")
    for layer in value_layers(built).values():
        layer.value_keys.data.zero_()
    return built


def test_forcing_a_value_that_is_the_same_changes_nothing():
    built = recaller()
    for layer in value_layers(built).values():
        layer.value_rows.data[:] = layer.value_rows.data[0]
    found = measure_swaps(
        subject(built), {0: np.array([1.0, 0, 0, 0]), 1: np.array([1.0, 0, 0, 0])}
    )
    assert all(swap.change.value == 0 for swap in found.swaps)
    assert all(swap.p == 1 for swap in found.swaps)


def said_of(changes: np.ndarray, right: float) -> str:
    """What is said of swaps that change the rows' accuracies by so much [b n]."""
    rng, n_rows = np.random.default_rng(0), len(changes)
    ps = westfall_young(changes, rng)
    means = changes.mean(0).tolist()
    swaps = tuple(
        Swap(0, j or None, None, 1.0, Estimate(means[j], means[j], means[j], 0.0), float(ps[j]))
        for j in range(len(means))
    )
    rights = torch.from_numpy((rng.random(n_rows) < right).astype(np.float64))
    accuracy = estimate_ratio(rights, torch.ones(n_rows), 0.03, rng)
    return value_usage.describe(Swaps(accuracy, swaps, 0.0, ROLE_NAMES, 5, False)).says


def test_of_null_swaps_some_is_said_to_cost_at_the_stated_rate():
    rng = np.random.default_rng(1)
    said = [said_of(rng.normal(size=(64, 40)) / 8, right=0.9) for _ in range(20)]
    # One of twenty is expected; more than four in less than a hundredth of such tests.
    assert sum("costs most" in says for says in said) <= 4
    assert any("None of 40 swaps is seen to cost accuracy (least p" in says for says in said)
    assert not any("matter" in says for says in said)


def test_a_swap_that_costs_is_said_to():
    changes = np.random.default_rng(1).normal(size=(64, 10)) / 8
    changes[:, 3] -= 0.2
    says = said_of(changes, right=0.9)
    assert "Forcing value 3 on every token of layer 0 costs most" in says
    assert "the worst of 10); dealing its choices out at random" in says


@pytest.mark.parametrize("shift", [0.0, -0.2])
def test_at_chance_swaps_tell_nothing(shift):
    changes = np.random.default_rng(1).normal(size=(64, 10)) / 8 + shift
    assert "swaps cannot tell which values matter" in said_of(changes, right=0.03)
    swaps = value_usage.measure(subject(model()))[-1]
    says = value_usage.describe(swaps).says
    assert "not seen to be above chance (3.1 %)" in says


def test_a_role_is_forced_alone():
    built = recaller()
    of = subject(built)
    found = measure_swaps(of, {0: np.array([1.0, 0, 0, 0]), 1: np.array([1.0, 0, 0, 0])})
    for swap in found.swaps:
        share = 1.0 if swap.role is None else float((of.batch.roles == swap.role).double().mean())
        # All tokens chose value 0, so that dealing and forcing it move nothing.
        assert swap.moved == pytest.approx(0.0 if swap.value in (None, 0) else share)


def trained(tmp_path) -> Run:
    """A run whose history was written by hand: keys begin at zero, then all tokens take value 2."""
    config = ModelConfig(stack="IM", d_model=16, options={"I.n_values": 4, "I.key_init": "zeros"})
    run = Run(tmp_path / "run", TASK, config, TrainConfig())
    run.claim()
    state = run.load_state()
    layer = state.model.blocks[0].mixer
    assert isinstance(layer, InnerFunctionAttention)
    for step in (1, 2):
        state.step = step
        with torch.no_grad():
            layer.value_rows.add_(0.0)
            layer.value_keys[0] = 0.0
            layer.value_keys[2] = float(step > 1)
            layer.value_keys[3] = -float(step > 1)
        run.keep_weights(state)
    return run


def test_history_begins_with_ties(tmp_path):
    run = trained(tmp_path)
    results = value_usage.measure(replace(subject(run.load_model(2)), run=run))
    past = results[1]
    assert isinstance(past, Past)
    assert past.steps.tolist() == [0, 1, 2]
    assert past.zero_keys
    assert past.used.tolist()[:2] == [1, 1]
    assert past.ties.tolist() == [1, 1, 0]
    assert past.churn[1] == 0
    assert past.used[2] == 2
    assert past.churn[2] == pytest.approx(1 - past.shares[2, 0])
    # All took value 0 before, so that dealing the later choices out changes nothing.
    assert past.churn_dealt[2] == pytest.approx(past.churn[2])
    low, high = past.churn_interval[2]
    assert 0 < low <= past.churn[2] <= high <= 1
    says = value_usage.describe(past).says
    assert "At step 0 1 of 4 values are used, all keys zero and every score tied" in says


def test_every_result_is_said_drawn_and_recorded(tmp_path):
    run = trained(tmp_path)
    results = value_usage.measure(replace(subject(run.load_model(2)), run=run))
    assert [type(result) for result in results] == [Uses, Past, Swaps]
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
    uses, swaps = value_usage.measure(subject(built))
    assert isinstance(uses, Uses)
    assert isinstance(swaps, Swaps)
    [layer] = uses.layers
    assert layer.shares.sum() == pytest.approx(3)
    many = replace(uses, layers=tuple(replace(layer, layer=i) for i in range(6)))
    assert "first 4 of 6 layers" in value_usage.describe(many).reading
    assert "up to 5 a layer" in value_usage.describe(swaps).reading
    for result, panels in ((many, 4), (swaps, 1)):
        fig = value_usage.draw(result)
        assert fig is not None
        assert len({trace["yaxis"] for trace in fig.to_dict()["data"]}) == panels


def test_a_model_without_values_is_not_looked_at():
    with pytest.raises(NotApplicableError, match="no block looks its values up"):
        value_usage.measure(subject(build("AM", vocab_size=64, d_model=16).eval()))


def test_roles_that_are_not_there_are_no_number():
    assert np.isnan(loads(np.zeros((0, 2), np.int64), 4)).all()
    assert (ROLES == VALUE).any()
