"""Experts knocked out: effects by loops, twins, roles, and words that abstain with the interval."""

import math

import numpy as np
import pytest
import torch

from analysis.base import NotApplicableError, Subject
from analysis.experts import knockout as expert_knockout
from analysis.experts.knockout import (
    LayerKnockout,
    knock_out_layer,
    measure,
    plan_knockout,
)
from analysis.experts.storage import (
    Site,
    build_sites,
    find_retrieval_layers,
)
from lab.intervals import bootstrap
from tasks.base import Batch
from tasks.mqar import MQAR
from tests.expert_models import TASK, N, memory, small
from tests.unit.analysis.cases.experts import change, compare_roles, knock_out

FACTS_TASK = MQAR(seq_len=N - 2, n_pairs=3, vocab_size=N)
"""Names the roles of the planted model's rows."""


def found_on(subject: Subject, n_experts: int = 4) -> tuple[Site, LayerKnockout]:
    site = build_sites(subject.model, subject.batch)[0]
    rng = np.random.default_rng(0)
    return site, knock_out_layer(site, subject.task.role_names, rng, n_experts)


@pytest.fixture(scope="module")
def usual() -> tuple[Site, LayerKnockout]:
    return found_on(Subject(TASK, *small()))


def test_effects_are_means_over_answers_with_intervals_over_rows(usual):
    site, found = usual
    columns = site.module.shape[1]
    rows = site.clean.rows.numpy()
    for deletion in found.deletions:
        expert = deletion.place[0] * columns + deletion.place[1]
        change = (site.delete(site.indices == expert).losses - site.whole.losses).double().numpy()
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
        assert site.delete(site.indices == int(expert)) is site.whole


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
    # The line at zero, and none of a twin.
    assert [shape["x0"] for shape in found.figure().to_dict()["layout"]["shapes"]] == [0]


def test_one_expert_that_holds_all_stands_out():
    model, batch = memory()
    with torch.no_grad():
        kept = find_retrieval_layers(model)[0].up[6].clone()
        find_retrieval_layers(model)[0].up.zero_()
        find_retrieval_layers(model)[0].up[6] = kept
        # A weight of its own, so that it is the most loaded.
        find_retrieval_layers(model)[0].down[6] *= 2
    _, found = found_on(Subject(FACTS_TASK, model, batch))
    (best,) = [d for d in found.deletions if abs(d.change.loss) > 1e-6]
    assert (best.place, best.twin) == ((1, 2), False)


@pytest.mark.parametrize(
    ("loss", "half", "verdict"),
    [
        (0.5, 0.1, "lower the loss"),
        (-0.5, 0.1, "raise the loss"),
        (0.1, 0.2, "show no effect"),
        (0.1, math.nan, "show no effect"),
        (0.004, 0.005, "hardly matter to the answers"),
        (-0.004, 0.005, "hardly matter to the answers"),
    ],
)
def test_words_abstain_where_the_interval_does(loss, half, verdict):
    assert change(loss, half).verdict == verdict


def test_a_model_without_product_keys_is_turned_away():
    model, batch = small("AM")
    with pytest.raises(NotApplicableError, match="product keys"):
        measure(Subject(TASK, model, batch))


def test_dear_models_are_tried_with_less(monkeypatch):
    model, batch = small("AP AP AP AP AP AP AP AP")
    subject = Subject(TASK, model, batch)
    assert plan_knockout(subject) == ((0, 1, 3, 4, 6, 7), 8, 5)
    monkeypatch.setattr(expert_knockout, "WORK", 0)
    assert plan_knockout(subject) == ((0, 7), 2, 4)
    assert [site.layer for site in build_sites(model, batch, plan_knockout(subject)[0])] == [
        0,
        7,
    ]


def test_an_expert_like_its_twins_seldom_stands_out():
    """Of an expert and a twin that harm alike, the expert harms more in half of all cases."""
    rng = np.random.default_rng(0)
    named = sum(
        "one expert stands out" in knock_out(*rng.normal(0.5, 0.025, 2), twins=1).says
        for _ in range(400)
    )
    # The interval of one is below the other's effect in 8 % of cases, half of a two-sided 16 %.
    assert named <= 48


def test_roles_that_need_experts_alike_are_not_ranked():
    rng = np.random.default_rng(0)
    ranked = sum(
        "needed most" in compare_roles(key=change(key), value=change(value)).says
        for key, value in rng.normal(0.5, 0.025, (400, 2))
    )
    assert ranked <= 8
