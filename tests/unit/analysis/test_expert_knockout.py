"""Experts knocked out: against reruns by hook, and a model in which each expert holds one fact."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.base import NotApplicableError, Subject
from analysis.experts import knockout as expert_knockout
from analysis.experts.answers_held import Answers, _shortlisted, answers_held, asked, holders
from analysis.experts.deletion import Site, retrieving, sites
from analysis.experts.effects import Change, LayerKnockout, layer_knockout
from analysis.experts.knockout import Roles, describe, draw, measure, planned
from analysis.interventions import knock_out_experts, transplant_experts
from analysis.record import to_plain
from analysis.scoring import scored
from analysis.statistics.intervals import bootstrap
from lab.models import LanguageModel, build
from tasks.base import Batch
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, n_pairs=4, vocab_size=32)
OPTIONS = {"P.n_experts": 12, "P.k": 2, "E.n_experts": 15, "E.k": 3, "E.n_retrieval_heads": 2}
N = 16
"""Facts, tokens, experts and channels of the planted model."""
FACTS = (torch.arange(N) * 5 + 3) % N
"""What each token is to be answered with."""


def small(
    stack: str = "AP AE", options: dict[str, object] | None = None
) -> tuple[LanguageModel, Batch]:
    own = {name: value for name, value in OPTIONS.items() if name[0] in stack}
    model = build(stack, vocab_size=32, d_model=16, options={**own, **(options or {})}, seed=1)
    return model.eval(), TASK.batch(split="test", size=5)


def memory() -> tuple[LanguageModel, Batch]:
    """Return a model in which expert e alone turns token e into its answer, and rows that ask.

    Token e is channel e; the queries' halves are its row and its column on the grid of 4 × 4.
    """
    options = {"P.n_experts": N, "P.n_retrieval_heads": 1, "P.k": 1, "P.d_retrieval": 8}
    model = build("NP", vocab_size=N, d_model=N, options=options, tied=False).eval()
    expert = retrieving(model)[0]
    with torch.no_grad():
        for table in (model.embed.weight, model.head.weight, expert.down):
            table.copy_(torch.eye(N))
        model.head.weight.mul_(4)
        for key in (expert.row_keys, expert.column_keys):
            key.copy_(torch.eye(4))
        expert.query.weight.zero_()
        for token in range(N):
            expert.query.weight[token // 4, token] = expert.query.weight[4 + token % 4, token] = 1
            expert.up[token] = 2 * torch.eye(N)[FACTS[token]]
    tokens = torch.stack(
        [torch.randperm(N, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    )
    return model, Batch(tokens, FACTS[tokens], tokens % 2, {})


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
def test_a_deletion_is_the_rerun_with_that_weight_at_zero(layer, options):
    model, batch = small(options=options)
    site = sites(model, batch)[layer]
    for expert in range(site.n_experts):
        with knock_out_experts(model, layer, [expert]):
            expected = scored(model, batch)
        found = site.without(site.choosing(expert))
        # The two sum the same terms in another order, in fp32.
        torch.testing.assert_close(found.losses, expected.losses, atol=1e-5, rtol=1e-5)
        assert (found.right == expected.right).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_deletion_at_the_tokens_of_a_role_or_in_some_rows_spares_the_others(layer):
    model, batch = small()
    site = sites(model, batch)[layer]
    expert = int(site.counts.argmax())
    for role, rows in product((None, *range(4)), (None, torch.tensor([1, 4]))):
        deleted = site.choosing(expert, role, rows)
        for place in np.ndindex(*deleted.shape):
            b, t = place[:2]
            expected = int(site.indices[place]) == expert
            expected &= role is None or int(batch.roles[b, t]) == role
            expected &= rows is None or b in (1, 4)
            assert bool(deleted[place]) == expected
        with silenced(model, layer, deleted):
            losses = scored(model, batch).losses
        torch.testing.assert_close(site.without(deleted).losses, losses, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_use_an_expert_keep_their_losses_to_the_bit():
    model, batch = small()
    for site in sites(model, batch):
        for expert in range(site.n_experts):
            found = site.without(site.choosing(expert)).losses
            for i, row in enumerate(site.clean.rows.tolist()):
                if not (site.indices[row] == expert).any():
                    assert found[i] == site.whole.losses[i]


def test_counts_and_loads_are_loops_over_choices():
    model, batch = small()
    for site in sites(model, batch):
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
    site = sites(model, batch)[layer]
    found, step = site.attribution(), 1e-5
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
    site = sites(model, batch)[0]
    assert site.whole.right.all()
    asked = batch.inputs.flatten()
    for expert in range(N):
        found = site.without(site.choosing(expert))
        assert (found.right == (asked != expert)).all()
        change = found.losses - site.whole.losses
        assert (change[asked == expert] > 1).all()
        assert (change[asked != expert] == 0).all()


@pytest.mark.parametrize("shortlist", [1, 4, None])
def test_the_holder_of_each_fact_is_found(shortlist):
    model, batch = memory()
    found = holders(model, batch, 0, shortlist=shortlist)
    np.testing.assert_array_equal(found.experts, batch.inputs[found.rows, found.positions])
    assert (found.seconds == 0).all()
    assert (found.effects > 1).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_holders_are_the_loop_over_all_experts(layer):
    model, batch = small()
    clean = scored(model, batch)
    changes = []
    for expert in range(len(retrieving(model)[layer].down)):
        with knock_out_experts(model, layer, [expert]):
            changes.append((scored(model, batch).losses - clean.losses).detach().numpy())
    found = holders(model, batch, layer, shortlist=None)
    order = np.sort(changes, axis=0)
    np.testing.assert_allclose(found.effects, np.maximum(order[-1], 0), atol=1e-5)
    np.testing.assert_allclose(found.seconds, np.maximum(order[-2], 0), atol=1e-5)
    clear = order[-1] - np.maximum(order[-2], 0) > 1e-4
    assert clear.any()
    np.testing.assert_array_equal(found.experts[clear], np.argmax(changes, axis=0)[clear])
    # Whoever is on the shortlist has the effect that the exact rerun gives it.
    listed = holders(model, batch, layer, shortlist=1)
    for i in np.flatnonzero(listed.experts >= 0):
        assert listed.effects[i] == pytest.approx(changes[listed.experts[i]][i], abs=1e-5)
    # Four answers a row.
    assert (listed.tried == 4).all()
    assert (listed.effects <= found.effects + 1e-5).all()


def test_a_shortlist_has_the_largest_attribution_of_the_row():
    model, batch = small()
    site = sites(model, batch)[0]
    harm = np.zeros((len(batch.inputs), site.n_experts))
    attribution = site.attribution()
    for place in np.ndindex(*attribution.shape):
        harm[place[0], int(site.indices[place])] += attribution[place].item()
    for row in range(len(batch.inputs)):
        used = np.unique(site.indices[row].numpy())
        expected = {int(e) for e in used[np.argsort(-harm[row, used])[:4]]}
        rows, experts = _shortlisted(site, 1)
        assert set(experts[rows == row].tolist()) == expected


def test_a_transplanted_expert_brings_its_fact_and_no_other():
    source, batch = memory()
    target, _ = memory()
    asked = batch.inputs.flatten()
    with torch.no_grad():
        retrieving(target)[0].up.zero_()
    assert not scored(target, batch).right.any()
    for expert in (0, 7, 15):
        with transplant_experts(source, target, 0, [expert]):
            assert (scored(target, batch).right == (asked == expert)).all()
            known = holders(target, batch, 0, shortlist=None)
            assert set(known.experts[asked == expert]) == {expert}
            assert set(known.experts[asked != expert]) == {-1}
    assert not scored(target, batch).right.any()


FACTS_TASK = MQAR(seq_len=N, n_pairs=4, vocab_size=32)
"""Gives the planted model's rows a length and names for their roles."""


def found_on(subject: Subject, n_experts: int = 4) -> tuple[Site, LayerKnockout]:
    site = sites(subject.model, subject.batch)[0]
    rng = np.random.default_rng(0)
    return site, layer_knockout(site, subject.task.role_names, rng, n_experts)


@pytest.fixture(scope="module")
def usual() -> tuple[Site, LayerKnockout]:
    return found_on(Subject(TASK, *small()))


def test_effects_are_means_over_answers_with_intervals_over_rows(usual):
    site, found = usual
    columns = site.module.shape[1]
    rows = site.clean.rows.numpy()
    for deletion in found.deletions:
        expert = deletion.place[0] * columns + deletion.place[1]
        change = (site.without(site.choosing(expert)).losses - site.whole.losses).double().numpy()
        assert deletion.change.loss == pytest.approx(change.mean(), abs=1e-7)
        assert deletion.choices == pytest.approx(site.counts[expert] / site.counts.sum())
        assert deletion.load == pytest.approx(site.loads[expert] / site.loads.sum())
        interval = bootstrap(change, np.random.default_rng(3), groups=rows)
        # Other resamples: a thousand fix an end to a few hundredths of the width.
        width = interval[1] - interval[0]
        assert deletion.change.loss_interval == pytest.approx(interval, abs=0.2 * width + 1e-9)
    assert [d.change.loss for d in found.deletions] == sorted(
        (d.change.loss for d in found.deletions), reverse=True
    )


def test_changes_are_by_the_role_of_the_answer_and_of_the_token():
    model, batch = memory()
    _, found = found_on(Subject(FACTS_TASK, model, batch))
    # Roles are the parity of the token: half the facts each, and no fact needs the other's tokens.
    assert set(found.by_answer) == {"key", "value"}
    assert [entry.role for entry in found.by_role] == ["key", "value"]
    assert [entry.tokens for entry in found.by_role] == [48, 48]
    assert found.everything.accuracy == -1
    for entry in found.by_role:
        assert entry.everything.accuracy == -0.5
        assert found.by_answer[entry.role].accuracy == -1
    parts = [entry.everything.loss for entry in found.by_role]
    assert sum(parts) == pytest.approx(found.everything.loss, rel=1e-5)


def test_unused_experts_change_nothing_and_are_counted():
    model, batch = memory()
    few = Batch(batch.inputs[:, :3], batch.targets[:, :3], batch.roles[:, :3], {})
    site, found = found_on(Subject(MQAR(seq_len=4, n_pairs=1, vocab_size=8), model, few))
    assert found.unused == N - len(few.inputs.unique()) > 0
    assert found.unused_change == 0
    for expert in np.flatnonzero(site.counts == 0):
        assert site.without(site.choosing(int(expert))) is site.whole


def test_an_expert_that_is_read_though_nobody_chose_it_is_noticed():
    model, batch = small()
    site = sites(model, batch)[1]
    # As if its use had gone unseen.
    site.__dict__["counts"] = np.where(np.arange(15) == site.counts.argmax(), 0, site.counts)
    assert site.unused_change() > 1e-4


def test_twins_are_used_and_chosen_about_as_often():
    model, batch = small()
    site, found = found_on(Subject(TASK, model, batch), n_experts=1)
    (twin,), (loaded,) = (
        [d for d in found.deletions if d.twin is is_twin] for is_twin in (True, False)
    )
    columns = site.module.shape[1]
    first, second = (d.place[0] * columns + d.place[1] for d in (loaded, twin))
    assert first == site.loads.argmax()
    others = [e for e in np.flatnonzero(site.counts) if e != first]
    nearest = sorted(abs(site.counts[e] - site.counts[first]) for e in others)[:5]
    assert second in others
    assert abs(site.counts[second] - site.counts[first]) <= nearest[-1]


def test_with_all_experts_among_the_most_loaded_no_twin_is_left():
    model, batch = memory()
    _, found = found_on(Subject(FACTS_TASK, model, batch), N)
    assert not any(d.twin for d in found.deletions)
    assert "no twin is left" in describe(found).says
    assert draw(found).layout.shapes[0].x0 == 0  # the line at zero, and no band


def test_one_expert_that_holds_all_stands_out():
    model, batch = memory()
    with torch.no_grad():
        kept = retrieving(model)[0].up[6].clone()
        retrieving(model)[0].up.zero_()
        retrieving(model)[0].up[6] = kept
        # A weight of its own, so that it is the most loaded.
        retrieving(model)[0].down[6] *= 2
    _, found = found_on(Subject(FACTS_TASK, model, batch))
    (best,) = [d for d in found.deletions if abs(d.change.loss) > 1e-6]
    assert (best.place, best.twin) == ((1, 2), False)
    says = describe(found).says
    assert says.startswith("The layer's experts lower the loss: deleting all 16")
    assert "One expert of the 4 most loaded stands out: deleting expert (1, 2)" in says


def test_the_expert_of_every_answer_is_named():
    model, batch = memory()
    found = answers_held(model, batch, 0, np.random.default_rng(0))
    assert (found.asked, found.held, found.rivals, found.lost) == (96, 96, 0, 96)
    assert found.holders == N
    for one in found.top:
        expert = one.place[0] * 4 + one.place[1]
        assert one.targets == ((int(FACTS[expert]), 6),)
        assert one.answers == 6
    # Six rows ask each token once: 15 pairs of each of 16 answers, of 96 · 95 / 2.
    assert found.same == 1
    assert found.any_two == pytest.approx(16 * 15 / (96 * 95 / 2))
    says = describe(found).says
    assert says.startswith("One expert holds 96 of 96 answers (100.0 %) in layer 0")
    assert "the same expert in 100.0 % (any two: 5.3 %)" in says
    texts = [annotation["text"] for annotation in draw(found).to_dict()["layout"]["annotations"]]
    assert f"6: {found.top[0].targets[0][0]} × 6" in texts


@pytest.mark.parametrize("shared", [False, True], ids=["idle", "two experts for every answer"])
def test_no_expert_holds_what_none_or_several_do(shared):
    model, batch = memory()
    layer = retrieving(model)[0]
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
            twins = retrieving(other)[0]
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
    found = answers_held(model, batch, 0, np.random.default_rng(0), most=40)
    assert (found.asked, found.held) == (40, 0)
    assert describe(found).says.startswith("No single expert matters: one holds 0 of 40 answers")
    assert np.isnan(found.same)
    assert draw(found).data


def test_a_random_model_has_no_holders():
    model, batch = small()
    found = answers_held(model, batch, 0, np.random.default_rng(0))
    assert found.held <= 1
    assert describe(found).says.startswith("No single expert matters")


def test_few_answers_are_drawn_where_there_are_many():
    _, batch = memory()
    some = asked(batch, 10, np.random.default_rng(0))
    kept = some.targets != -100
    assert kept.sum() == 10
    assert (some.targets[kept] == batch.targets[kept]).all()
    assert asked(batch, 96, np.random.default_rng(0)) is batch


def test_idle_experts_show_no_effect():
    model, batch = small()
    with torch.no_grad():
        retrieving(model)[0].up.zero_()
    _, found = found_on(Subject(TASK, model, batch), n_experts=1)
    assert found.everything.loss == pytest.approx(0, abs=1e-6)
    assert all(d.change.loss == pytest.approx(0, abs=1e-6) for d in found.deletions)


@pytest.mark.parametrize(
    ("change", "opening"),
    [
        (Change(0.5, (0.4, 0.6), -0.1, (-0.2, 0.0)), "The layer's experts lower the loss"),
        (Change(-0.5, (-0.6, -0.4), 0.1, (0.0, 0.2)), "The layer's experts raise the loss"),
        (Change(0.1, (-0.1, 0.3), 0.0, (0.0, 0.0)), "No effect of the layer's experts shows"),
        (Change(0.1, (math.nan, math.nan), 0.0, (math.nan, math.nan)), "No effect"),
        (Change(0.004, (0.001, 0.009), 0.0, (0.0, 0.0)), "The layer's experts hardly matter"),
        (Change(-0.004, (-0.009, 0.001), 0.0, (0.0, 0.0)), "The layer's experts hardly matter"),
    ],
)
def test_words_abstain_where_the_interval_does(usual, change, opening):
    assert describe(replace(usual[1], everything=change)).says.startswith(opening)


def test_every_layer_has_a_figure_and_the_roles_share_one(monkeypatch):
    monkeypatch.setattr(expert_knockout, "PLANS", ((6, 2, 1.0),))
    model, batch = small()
    results = measure(Subject(TASK, model, batch))
    assert [type(result) for result in results] == [LayerKnockout, LayerKnockout, Roles, Answers]
    for result in results:
        words, fig = describe(result), draw(result)
        assert fig.data
        assert words.says in words.alt
        assert to_plain(result)


def test_a_model_without_product_keys_is_turned_away():
    model, batch = small("AM")
    with pytest.raises(NotApplicableError, match="product keys"):
        measure(Subject(TASK, model, batch))
    model, batch = small("AM AE")
    with pytest.raises(ValueError, match="layer=0: has no product-key experts; known: 1"):
        holders(model, batch, 0)
    with pytest.raises(ValueError, match="shortlist=0: must be ≥ 1"):
        holders(model, batch, 1, shortlist=0)


def test_dear_models_are_tried_with_less(monkeypatch):
    model, batch = small("AP AP AP AP AP AP AP AP")
    subject = Subject(TASK, model, batch)
    assert planned(subject) == ((0, 1, 3, 4, 6, 7), 8, 5)
    monkeypatch.setattr(expert_knockout, "WORK", 0)
    assert planned(subject) == ((0, 7), 2, 4)
    assert [site.layer for site in sites(model, batch, planned(subject).layers)] == [0, 7]
