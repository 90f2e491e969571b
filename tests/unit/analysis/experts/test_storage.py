"""Deletions are reruns with weights of zero; holders are found where each expert holds one fact."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.experts import storage
from analysis.experts.storage import (
    build_sites,
    choose_candidates,
    find_holders,
    find_retrieval_layers,
    measure_held_answers,
)
from analysis.scoring import scored
from lab.models import LanguageModel, build
from tests.expert_models import FACTS, N, memory, small


@contextmanager
def silenced(model: LanguageModel, layer: int, deleted: Tensor) -> Iterator[None]:
    """Set weights to zero, one choice at a time."""

    def silence(weights: Tensor, point: object) -> Tensor:
        weights = weights.clone()
        for place in deleted.nonzero().tolist():
            weights[tuple(place)] = 0
        return weights

    with model.hooks([(f"blocks.{layer}.mlp.hook_expert_weights", silence)]):
        yield


@pytest.mark.parametrize("options", [{}, {"1.A.mask": "oracle"}], ids=["no mask", "oracle mask"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_deletion_is_a_rerun_with_those_weights_at_zero(layer, options):
    """Everywhere, at the tokens of a role, or in some rows."""
    model, batch = small(options=options)
    site = build_sites(model, batch)[layer]
    expert = int(site.counts.argmax())
    for role, rows in product((None, *range(4)), (None, torch.tensor([1, 4]))):
        deleted = site.indices == expert
        if role is not None:
            deleted &= (batch.roles == role)[..., None, None]
        if rows is not None:
            deleted[[row for row in range(5) if row not in rows]] = False
        with silenced(model, layer, deleted):
            losses = scored(model, batch).losses
        torch.testing.assert_close(site.delete(deleted).losses, losses, atol=1e-5, rtol=1e-5)


def test_counts_and_loads_are_loops_over_choices():
    model, batch = small()
    for site in build_sites(model, batch):
        counts, loads = np.zeros(site.n_experts), np.zeros(site.n_experts)
        for expert, weight in zip(
            site.indices.flatten().tolist(), site.weights.flatten().tolist(), strict=True
        ):
            counts[expert] += 1
            loads[expert] += abs(weight)
        np.testing.assert_array_equal(site.counts, counts)
        np.testing.assert_allclose(site.loads, loads)


@pytest.mark.parametrize("layer", [0, 1])
def test_attribution_is_the_slope_of_the_loss_as_a_choice_fades(layer):
    model, batch = small()
    model.double()
    site = build_sites(model, batch)[layer]
    found, step = site.attribute(), 1e-5
    for place in [(0, 0, 0, 0), (1, 5, 1, 1), (4, 11, 0, 1), (2, 8, 1, 0)]:
        losses = []
        for factor in (1 + step, 1 - step):

            def fade(
                weights: Tensor,
                point: object,
                factor: float = factor,
                place: tuple[int, ...] = place,
            ) -> Tensor:
                weights = weights.clone()
                weights[place] *= factor
                return weights

            with model.hooks([(f"blocks.{layer}.mlp.hook_expert_weights", fade)]):
                losses.append(scored(model, batch).losses.sum().item())
        assert found[place].item() == pytest.approx(
            (losses[1] - losses[0]) / (2 * step), rel=1e-4, abs=1e-8
        )


def test_deleting_an_expert_forgets_its_fact_and_no_other():
    model, batch = memory()
    site = build_sites(model, batch)[0]
    assert site.whole.right.all()
    asked = batch.inputs.flatten()
    for expert in range(N):
        found = site.delete(site.indices == expert)
        assert (found.right == (asked != expert)).all()
        change = found.losses - site.whole.losses
        assert (change[asked == expert] > 1).all()
        assert (change[asked != expert] == 0).all()


def test_an_expert_that_is_read_though_nobody_chose_it_is_noticed():
    model, batch = small()
    site = build_sites(model, batch)[1]
    # As if its use had gone unseen.
    site.__dict__["counts"] = np.where(np.arange(15) == site.counts.argmax(), 0, site.counts)
    assert site.measure_unused() > 1e-4


def test_the_holder_of_each_fact_is_found():
    model, batch = memory()
    found = find_holders(build_sites(model, batch)[0])
    np.testing.assert_array_equal(found.experts, batch.inputs[found.rows, found.positions])
    assert (found.seconds == 0).all()
    assert (found.effects > 1).all()


def test_a_shortlist_has_the_largest_attribution_of_the_row(monkeypatch):
    monkeypatch.setattr(storage, "SHORTLIST", 1)
    model, batch = small()
    site = build_sites(model, batch)[0]
    harm = np.zeros((len(batch.inputs), site.n_experts))
    attribution = site.attribute()
    for place in np.ndindex(*attribution.shape):
        harm[place[0], int(site.indices[place])] += attribution[place].item()
    for row in range(len(batch.inputs)):
        used = np.unique(site.indices[row].numpy())
        expected = {int(e) for e in used[np.argsort(-harm[row, used])[:4]]}
        rows, experts = choose_candidates(site)
        assert set(experts[rows == row].tolist()) == expected


def test_the_expert_of_every_answer_is_named():
    model, batch = memory()
    found = measure_held_answers(build_sites(model, batch)[0], np.random.default_rng(0))
    assert (found.asked, found.held, found.rivals, found.lost) == (96, 96, 0, 96)
    assert found.holders == N
    for one in found.top:
        expert = one.place[0] * 4 + one.place[1]
        assert one.targets == ((int(FACTS[expert]), 6),)
        assert one.answers == 6
    # Six rows ask each token once: 15 pairs of each of 16 answers, of 96 · 95 / 2.
    assert found.same == 1
    assert found.any_two == pytest.approx(16 * 15 / (96 * 95 / 2))
    rows = found.numbers().rows
    assert ("same token, same expert (any two)", "100.0 % (5.3 %)") in rows
    assert rows[0][1] == f"6: {found.top[0].targets[0][0]} × 6"


@pytest.mark.parametrize("shared", [False, True], ids=["idle", "two experts for every answer"])
def test_no_expert_holds_what_none_or_several_do(shared):
    model, batch = memory()
    layer = find_retrieval_layers(model)[0]
    with torch.no_grad():
        if not shared:
            layer.up.zero_()
        else:
            # Twins: each token takes its own expert and the next column's, which answers alike.
            other = build(
                "NP",
                vocab_size=N,
                d_model=N,
                options={
                    "P.n_experts": N,
                    "P.n_retrieval_heads": 2,
                    "P.k": 1,
                    "P.d_retrieval": 8,
                },
                tied=False,
            ).eval()
            twins = find_retrieval_layers(other)[0]
            for name, table in model.state_dict().items():
                if other.state_dict()[name].shape == table.shape:
                    other.state_dict()[name].copy_(table)
            for key in (twins.row_keys, twins.column_keys):
                key.copy_(torch.eye(4))
            twins.query.weight.zero_()
            for token in range(N):
                for head, column in enumerate((token % 4, (token + 1) % 4)):
                    twins.query.weight[4 * head + token // 4, token] = 1
                    twins.query.weight[8 + 4 * head + column, token] = 1
            for expert in range(N):
                row = expert // 4 * 4
                before = row + (expert - 1) % 4
                twins.down[expert, row : row + 4] = 1
                twins.up[expert] = 2 * torch.eye(N)[FACTS[[expert, before]]].sum(0)
            model = other
            # A token that is its neighbour's answer speaks for that one.
            rows = torch.arange(N).view(4, 4)
            near = torch.stack([rows.roll(1, 1), rows.roll(-1, 1)]).view(2, N)
            clear = (FACTS[near] != torch.arange(N)).all(0)[batch.inputs]
            batch = replace(batch, targets=batch.targets.where(clear, -100))
    found = measure_held_answers(build_sites(model, batch)[0], np.random.default_rng(0), most=40)
    assert (found.asked, found.held) == (40, 0)
    assert np.isnan(found.same)
    assert found.figure().data


def test_identical_experts_are_noticed():
    model, batch = small()
    with torch.no_grad():
        layer = find_retrieval_layers(model)[0]
        for table in (layer.down, layer.up):
            table[1] = table[0]
    found = measure_held_answers(build_sites(model, batch)[0], np.random.default_rng(0))
    assert found.copies == 2
    with torch.no_grad():
        layer.up[1, 0] += 1e-3
    found = measure_held_answers(build_sites(model, batch)[0], np.random.default_rng(0))
    assert found.copies == 0


def test_a_random_model_has_no_holders():
    model, batch = small()
    found = measure_held_answers(build_sites(model, batch)[0], np.random.default_rng(0))
    assert found.copies == 0
    assert found.held <= 1
