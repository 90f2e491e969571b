"""Planted heads are named, and nothing is invented where there is nothing to see."""

import numpy as np
import pytest
import torch

from analysis.matrices import heads, rollout
from analysis.matrices.head_reach import HeadReach
from analysis.matrices.head_scores import HeadScores
from analysis.matrices.patterns import PATTERNS
from analysis.matrices.row_sums import sum_row
from analysis.mixing import collect_mixers
from analysis.plain import to_plain
from analysis.plots.heads import LINES, choose_log_ticks
from lab.models import build
from tests.unit.analysis.matrices.planted_heads import (
    GivenMatrix,
    build_subject,
    build_with_mixer,
    plant,
    repeat_rows,
)


def test_planted_heads_are_named_and_uniform_ones_are_not(monkeypatch):
    model = build_with_mixer(monkeypatch, GivenMatrix, "UM*2")
    plain_one = repeat_rows(build_subject(rows=1, model=model))
    for layer in (0, 1):
        kinds = (("previous token", "first token"), ("induction", "duplicate token"))[layer]
        plant(model, layer, plain_one.batch, kinds)
    scores, _ = heads.measure(plain_one)
    assert isinstance(scores, HeadScores)
    shown = scores.find_patterns()
    named = {(int(scores.layers[h]), int(scores.heads[h]), PATTERNS[p]) for h, p in shown}
    planted_ones = {
        (0, 0, "previous token"),
        (0, 1, "first token"),
        (1, 0, "induction"),
        (1, 1, "duplicate token"),
    }
    assert named == planted_ones
    np.testing.assert_allclose([scores.shares[h, p] for h, p in shown], 1.0, rtol=1e-5)
    for layer in (0, 1):
        module = model.get_submodule(f"blocks.{layer}.mixer")
        assert isinstance(module, GivenMatrix)
        module.given = torch.ones(2, 16, 16).tril() / torch.arange(1, 17)[:, None]
    scores, reach = heads.measure(plain_one)
    assert isinstance(scores, HeadScores)
    assert isinstance(reach, HeadReach)
    np.testing.assert_allclose(scores.shares, np.tile(scores.chance, (4, 1)), rtol=1e-5)
    np.testing.assert_allclose(reach.effective_keys, reach.uniform_keys, rtol=1e-5)
    np.testing.assert_allclose(reach.entropy, reach.uniform_entropy, rtol=1e-5)
    np.testing.assert_allclose(reach.distance, reach.uniform_distance, rtol=1e-5)
    assert heads.describe(scores).says.startswith("No head surely shows one of these patterns")


@pytest.mark.parametrize("stack", ["AM IM", "SM SM"])
def test_a_random_model_shows_no_pattern(stack):
    scores, _ = heads.measure(build_subject(stack, rows=16))
    assert isinstance(scores, HeadScores)
    assert scores.rows == 16
    assert (scores.half_widths > 0).all()
    # A fresh SSD layer decays: what is near is all it sees, the token before included.
    assert {PATTERNS[p] for _, p in scores.find_patterns()} <= {"previous token"}


def test_intervals_are_of_the_mean_over_rows():
    found = build_subject(rows=16)
    scores, _ = heads.measure(found)
    assert isinstance(scores, HeadScores)
    [first, _] = collect_mixers(found.model, found.batch)
    with torch.no_grad():
        rows = [
            sum_row(first, r, found.batch.inputs[r], np.random.default_rng(0)) for r in range(16)
        ]
    shares = torch.stack([row.on_patterns / row.with_patterns for row in rows])[:, 0, 0].numpy()
    assert scores.shares[0, 0] == pytest.approx(shares.mean(), rel=1e-5)
    half = 1.96 * shares.std(ddof=1) / 4
    assert scores.half_widths[0, 0] == pytest.approx(half, rel=1e-3)


def test_many_heads_share_lines_and_every_head_is_drawn():
    model = build("AM*7", vocab_size=32, d_model=16, n_heads=4)
    for result in heads.measure(build_subject(model=model)):
        fig = heads.draw(result)
        assert fig is not None
        traces = fig.to_dict()["data"]
        dots = [trace["text"] for trace in traces if trace["mode"] == "markers"]
        assert len(dots) >= 2
        assert all(len(names) == 28 > LINES for names in dots)
        assert list(fig.layout["yaxis"]["ticktext"]) == [str(layer) for layer in range(7)]
        assert "Heads of a layer share a line" in heads.describe(result).reading
        assert to_plain(result)["layers"] == [layer for layer in range(7) for _ in range(4)]


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((0.5, 200.0), ["1", "10", "100"]),
        ((1.5, 40.0), ["3", "10", "30"]),
        ((3.0, 9.0), ["3", "6", "9"]),
        ((31.0, 34.0), ["32"]),
    ],
)
def test_logarithmic_axes_have_few_and_even_labels(ends, labels):
    assert list(choose_log_ticks(*ends).values()) == labels


def test_a_single_row_is_sure_of_no_head_and_no_recall(monkeypatch):
    model = build_with_mixer(monkeypatch, GivenMatrix, "UM*2")
    found = build_subject(rows=1, model=model)
    plant(model, 0, found.batch, ("previous token", "previous token"))
    plant(model, 1, found.batch, ("induction", "induction"))
    scores, _ = heads.measure(found)
    assert isinstance(scores, HeadScores)
    assert scores.find_patterns() == []
    assert heads.describe(scores).says.startswith("Undecided, because one row of the batch has no")
    [result] = rollout.measure(found)
    assert np.isnan(result.interval).all()
    assert rollout.describe(result).says.startswith("It is uncertain whether recall shows")


def test_heads_without_mass_are_said_to_have_none():
    model = build("SM", vocab_size=32, d_model=16, options={"S.skip": False})
    with torch.no_grad():
        model.get_parameter("blocks.0.mixer.B_proj.weight").zero_()
    for result in heads.measure(build_subject(model=model)):
        assert heads.describe(result).says == "No head has any mass."
