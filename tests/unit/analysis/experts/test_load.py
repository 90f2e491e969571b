"""What is chosen, by loops over all experts; planted ties, coalitions, dead experts are found."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.base import NotApplicableError, Subject
from analysis.experts.load import (
    ExpertChoices,
    LoadByRank,
    LoadComparison,
    bound_standing,
    choose_ranks,
    draw_layers,
    find_expert_layers,
    measure,
    measure_load,
    record_choices,
)
from analysis.plain import to_plain
from lab.layers.retrieval import RetrievedExperts
from lab.layers.routed import RoutedMoE
from lab.models import LanguageModel, build
from tasks.mqar import MQAR
from tests.unit.analysis.cases.experts import choose

TASK = MQAR(seq_len=16, vocab_size=32)
BATCH = TASK.batch(split="test", size=24)
SMALL = {"E.n_experts": 42, "E.k": 3, "P.n_experts": 42, "P.k": 3, "P.n_retrieval_heads": 2}


def model(stack: str, **options) -> LanguageModel:
    chosen = {name: value for name, value in {**SMALL, **options}.items() if name[0] in stack}
    return build(stack, vocab_size=32, d_model=16, options=chosen, seed=1).eval()


def subject(stack: str, **options) -> Subject:
    return Subject(TASK, model(stack, **options), BATCH)


def random_choices(tokens: int, heads: int, k: int, n_experts: int, seed: int = 0) -> ExpertChoices:
    """Uniform choices: each head and token draws k distinct experts."""
    rng = np.random.default_rng(seed)
    scores = rng.random((tokens, heads, n_experts))
    found = choose(np.argsort(scores, axis=-1)[..., :k], n_experts)
    return replace(found, weights=rng.normal(size=(tokens, heads, k)))


@pytest.mark.parametrize("stack", ["AE", "AP", "AR", "AX"])
def test_choices_are_those_of_a_loop_over_all_experts(stack):
    lm = model(stack)
    (chosen,) = record_choices(lm, BATCH)
    (module,) = find_expert_layers(lm).values()
    cache = lm.run_with_cache(BATCH.inputs)[1]
    prefix = "blocks.0.mlp.hook_"
    shape = chosen.indices.shape
    np.testing.assert_array_equal(
        chosen.indices, cache[f"{prefix}expert_indices"].reshape(shape).numpy()
    )
    np.testing.assert_allclose(
        # Rows are run in smaller parts: fp32 sums in another order.
        chosen.weights,
        cache[f"{prefix}expert_weights"].detach().reshape(shape).numpy(),
        atol=1e-5,
    )
    n_experts = 42 if isinstance(module, RetrievedExperts) else 4
    assert chosen.n_experts == n_experts
    for token, head in itertools.product(range(0, shape[0], 29), range(shape[1])):
        if isinstance(module, RoutedMoE):
            p = cache[f"{prefix}router_scores"].detach().flatten(0, 1)[token]
            scores = [math.log(x) for x in p.tolist()]
        else:
            both = cache[f"{prefix}subkey_scores"].detach().flatten(0, 1)[token, head].tolist()
            rows = module.shape[0]
            scores = [r + c for r in both[:rows] for c in both[rows:]]
        order = sorted(range(n_experts), key=lambda e: -scores[e])
        assert set(order[: module.k]) == set(chosen.indices[token, head].tolist())
        gap = scores[order[module.k - 1]] - scores[order[module.k]]
        # fp32 scores of order 1.
        assert chosen.margins[token, head] == pytest.approx(gap / np.std(scores), abs=1e-4)


def test_with_all_experts_chosen_there_is_no_next_one():
    (chosen,) = record_choices(model("AR", **{"R.n_experts": 2, "R.k": 2}), BATCH)
    assert np.isnan(chosen.margins).all()
    assert not chosen.tied.any()
    _, comparison = measure(subject("AR", **{"R.n_experts": 2}))
    assert comparison.numbers().rows == (("0", "0.0 %", "–"),)


def test_a_model_without_experts_says_so():
    with pytest.raises(NotApplicableError, match="no block chooses among experts"):
        measure(subject("AM"))


def test_load_is_the_loop_over_choices():
    rng = np.random.default_rng(3)
    chosen = random_choices(50, 3, 4, 20)
    # Favour a few, so that nothing is at its expected value.
    few = rng.random(50) < 0.5
    chosen.indices[few, 0] = [0, 1, 2, 3]
    found = measure_load(chosen, seed=0)
    counts, weighted, served = [0] * 20, [0.0] * 20, [0] * 20
    twice, jaccard = 0, []
    for token in range(50):
        sets = [set(chosen.indices[token, head].tolist()) for head in range(3)]
        for expert in set.union(*sets):
            served[expert] += 1
        twice += 12 - len(set.union(*sets))
        for a, b in itertools.combinations(sets, 2):
            jaccard.append(len(a & b) / len(a | b))
        for expert, w in zip(
            chosen.indices[token].ravel(), chosen.weights[token].ravel(), strict=True
        ):
            counts[expert] += 1
            weighted[expert] += abs(w)
    standing = [e for e in range(20) if served[e] >= 0.9 * 50]
    assert found.standing_share == pytest.approx(sum(counts[e] for e in standing) / 600)
    assert found.twice == pytest.approx(twice / 600)
    assert found.overlap == pytest.approx(np.mean(jaccard))
    p = [x / sum(counts) for x in counts]
    assert found.choices.used == sum(x > 0 for x in p) / 20
    assert found.choices.effective == pytest.approx(math.exp(-sum(x * math.log(x) for x in p if x)))
    assert found.choices.top == pytest.approx(sum(sorted(p)[-12:]))
    for curve, loads in ((found.by_rank, counts), (found.weighted_by_rank, weighted)):
        ranked = sorted(loads, reverse=True)
        expected = [ranked[rank - 1] / (sum(loads) / 20) for rank in choose_ranks(20)]
        np.testing.assert_allclose(curve, expected)


@pytest.mark.parametrize(("heads", "k", "n_experts"), [(4, 8, 64), (1, 1, 40), (2, 1, 300)])
def test_uniform_choice_is_its_own_null(heads, k, n_experts):
    """The stated chance values against choices that are uniform, each to its sampling error."""
    found = measure_load(random_choices(400, heads, k, n_experts), seed=5)
    draws = 400 * heads
    assert found.uniform.used == pytest.approx(1 - (1 - k / n_experts) ** draws)
    error = 4 / math.sqrt(draws * k)
    assert found.choices.used == pytest.approx(found.uniform.used, abs=0.05)
    assert found.evenness == pytest.approx(1, abs=0.05)
    assert found.choices.gini == pytest.approx(found.uniform.gini, abs=0.05)
    assert found.choices.top == pytest.approx(found.uniform.top, abs=0.05)
    both = [found.twice, found.overlap], [found.twice_uniform, found.overlap_uniform]
    assert both[0] == pytest.approx(
        both[1] if heads > 1 else [math.nan] * 2, abs=error, nan_ok=True
    )
    low, high = found.band.T
    inside = (low - 1e-9 <= found.by_rank) & (found.by_rank <= high + 1e-9)
    # Pointwise 95 % bands from 40 draws; ranks go up and down together.
    assert inside.mean() > 0.6
    assert not found.collapsed


@pytest.mark.parametrize(
    ("heads", "k", "n_experts", "tokens"), [(8, 2, 4, 300), (3, 3, 4, 12), (1, 7, 8, 10)]
)
def test_standing_experts_of_random_choice_are_its_null(heads, k, n_experts, tokens):
    """Also where few experts leave random choice hardly anything else."""
    found = [
        measure_load(random_choices(tokens, heads, k, n_experts, seed), seed=0)
        for seed in range(60)
    ]
    shares = np.array([one.standing_share for one in found])
    error = 4 * shares.std() / math.sqrt(60) + 1e-3
    assert shares.mean() == pytest.approx(found[0].standing_uniform, abs=error)
    assert not any(one.stands_out or one.collapsed for one in found)


def test_the_null_of_standing_experts_at_both_ends():
    assert bound_standing(4, 1, 4, 20, seed=0) == (1.0, 1.0)
    assert bound_standing(1024, 8, 4, 2048, seed=0) == (pytest.approx(0, abs=1e-12), 0.0)


def test_a_planted_dead_expert_is_found():
    chosen = random_choices(500, 2, 2, 16)
    # Expert 5's choices go to its neighbour, unless that would choose it twice.
    alive = np.where(chosen.indices == 5, 6, chosen.indices)
    found = measure_load(replace(chosen, indices=alive.astype(np.int32)), seed=0)
    assert found.choices.used == 15 / 16
    assert found.uniform.used == pytest.approx(1)
    assert found.by_rank[-1] == 0
    line: Any = next(LoadByRank((found,)).figure().select_traces({"name": "layer 0"}))
    assert max(line.x[~np.isnan(line.y)]) == 15


def test_zero_keys_are_a_tie_and_a_collapse():
    loads, comparison = measure(subject("AE*2", **{"E.key_init": "zeros"}))
    assert isinstance(loads, LoadByRank)
    assert isinstance(comparison, LoadComparison)
    for one in loads.layers:
        assert one.collapsed
        assert (one.tied, one.margin, one.overlap) == (1, 0, 1)
        assert one.choices.effective == pytest.approx(3)
    assert comparison.numbers().rows == (("0", "100.0 %", "0"), ("1", "100.0 %", "0"))


@pytest.mark.parametrize("stack", ["AE*2", "AP", "AR", "AX"])
def test_an_untrained_layer_is_not_called_collapsed(stack):
    loads, comparison = measure(subject(stack))
    assert isinstance(loads, LoadByRank)
    assert isinstance(comparison, LoadComparison)
    for one in loads.layers:
        assert not one.collapsed
        assert one.tied < 0.01
        assert one.margin > 0
    assert not any(one.stands_out for one in comparison.loads)


def test_a_planted_coalition_is_found():
    chosen = random_choices(400, 2, 3, 60)
    rng = np.random.default_rng(2)
    faithful = rng.random(400) < 0.95
    chosen.indices[faithful, 0] = [57, 58, 59]
    found = measure_load(chosen, seed=0)
    assert 0.45 < found.standing_share < 0.55
    assert not found.collapsed
    chosen.indices[faithful, 1] = [57, 58, 59]
    assert measure_load(chosen, seed=0).collapsed


def test_weights_that_are_all_zero_are_drawn():
    chosen = random_choices(50, 2, 3, 20)
    found = measure_load(replace(chosen, weights=np.zeros_like(chosen.weights)), seed=0)
    assert not found.weighted_by_rank.any()
    assert LoadByRank((found,)).figure().to_dict()["data"]


@pytest.mark.parametrize("stack", ["AE AP AR AX", "NX*9"])
def test_every_result_is_json_words_and_a_figure(stack):
    for result in measure(subject(stack)):
        json.dumps(to_plain(result), allow_nan=False)
        assert "by_rank" not in str(to_plain(result))
        assert len((result.figure().to_json() or "").encode()) < 200_000


def test_of_many_layers_four_have_a_name():
    lines = draw_layers([(layer, np.ones(1), np.ones(1)) for layer in (1, *range(3, 12))])
    assert [line.name for line in lines if line.name] == [f"layer {i}" for i in (1, 5, 8, 11)]
    assert {line.look for line in lines} == {-1, 0, 1, 2, 3}
