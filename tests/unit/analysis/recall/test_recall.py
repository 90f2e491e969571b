"""Masses and bins against loops over entries and queries; planted heads have their mass."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from analysis import recall
from analysis.base import NotApplicableError, Subject
from analysis.figures.theme import MUTED
from analysis.plain import to_plain
from analysis.recall import PairMass, RecallByPlace, measure_by_place, measure_pair_mass
from analysis.statistics.comparisons import bin_accuracy
from lab.intervals import bound_share
from lab.layers.mixer import adapt
from lab.models import Block, build
from tasks.mqar import MQAR
from tests import mechanisms
from tests.intervened import Opaque

TASK = MQAR(seq_len=16, vocab_size=32).replace(n_pairs=(2, 4))
BATCH = TASK.batch(split="test", size=5)


def found_in(subject: Subject) -> PairMass:
    found = measure_pair_mass(subject)
    assert found is not None
    return found


def test_a_planted_head_has_its_mass():
    batch = mechanisms.TASK.batch(split="test", size=6)
    found = found_in(Subject(mechanisms.TASK, mechanisms.induction(), batch))
    written, asked = found.share[0, 2], found.share[1, 0]
    assert written == pytest.approx(1, abs=1e-4)
    # A first key has gathered itself: its query halves its mass among key and value.
    first = (batch.links["value_pos"] == 1).double().mean().item() / 2
    assert asked == pytest.approx(1 - first, abs=1e-2)


def test_uniform_rows_have_chance_and_no_head_stands_out():
    model = mechanisms.blank("AN", {"A.position": "none"})
    found = found_in(Subject(mechanisms.TASK, model, mechanisms.TASK.batch(split="test", size=6)))
    assert found.share[0] == pytest.approx(found.chance)
    assert found.says.startswith("No head clearly looks at its pair")


def test_a_mixer_without_matrix_is_named_and_left_out():
    model = build("AM AM", vocab_size=32, d_model=16).eval()
    for layer, lines in ((1, 1), (0, 0)):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        block.mixer = adapt(Opaque())
        results = recall.measure(Subject(TASK, model, BATCH))
        if lines:
            assert isinstance(results[0], PairMass)
            assert results[0].without == (1,)
            assert results[0].numbers().rows[-1][:2] == ("no matrix", "layer 1")
        else:
            assert [type(result) for result in results] == [RecallByPlace]


@torch.no_grad()
def test_recall_is_the_loop_over_queries_of_the_probe_split():
    task = MQAR(seq_len=32, n_pairs=4, vocab_size=64)
    model = build("AM", vocab_size=64, d_model=16).eval()
    # Random weights are right by luck alone: a head of few tokens makes luck common.
    model.head.weight = nn.Parameter(model.head.weight.clone())
    model.head.weight[:32] = 0
    model.head.weight[36:] = 0
    batch = task.batch(split="test", size=200)
    found = measure_by_place(Subject(task, model, batch))
    probe = task.batch(split="probe", size=200)
    answers = model(probe.inputs).argmax(-1)
    tally: dict[str, dict[int, list[bool]]] = {"distance": {}, "slot": {}, "decoy": {}}
    for row in range(200):
        for i, query in enumerate(probe.links["query_pos"][row].tolist()):
            if query < 0:
                continue
            right = bool(answers[row, query] == probe.targets[row, query])
            distance = query - int(probe.links["value_pos"][row, i])
            start = 1
            while 2 * start <= distance:
                start *= 2
            key = probe.inputs[row, query]
            stored = 2 * int((probe.links["query_pos"][row] >= 0).sum())
            others = [p for p in range(stored, query) if probe.roles[row, p] == 3]
            decoy = any(bool(probe.inputs[row, p] == key) for p in others)
            for name, place in (("distance", start), ("slot", i), ("decoy", int(decoy))):
                tally[name].setdefault(place, []).append(right)
    assert found.split == "probe"
    assert found.decoy is not None
    assert found.slot is not None
    for name, binned in (
        ("distance", found.distance),
        ("slot", found.slot),
        ("decoy", found.decoy),
    ):
        assert binned.first.tolist() == sorted(tally[name])
        for i, start in enumerate(binned.first.tolist()):
            assert binned.count[i] == len(tally[name][start])
            assert binned.accuracy[i] == pytest.approx(np.mean(tally[name][start]))
            assert 0 <= binned.interval[i, 0] <= binned.accuracy[i] <= binned.interval[i, 1] <= 1
    every = [right for rights in tally["slot"].values() for right in rights]
    assert 0 < np.mean(every) == pytest.approx(found.accuracy)


def test_bins_end_where_the_next_begins():
    number = np.array([1, 2, 3, 9, 9, 30])
    right = np.array([True, False, True, True, True, False])
    rows = np.array([0, 0, 1, 1, 2, 2])
    found = bin_accuracy(number, 2 ** np.arange(6), right, rows, np.random.default_rng(0))
    assert found.first.tolist() == [1, 2, 8, 16]
    assert found.last.tolist() == [1, 3, 15, 30]
    assert found.accuracy.tolist() == [1, 0.5, 1, 0]
    assert found.count.tolist() == [1, 2, 2, 1]


def test_an_interval_knows_how_few_and_how_alike_answers_are():
    rng = np.random.default_rng(0)
    all_right = bound_share(np.ones(10, bool), np.repeat(np.arange(5), 2), rng)
    assert all_right == pytest.approx((0.7225, 1), abs=1e-4)  # Wilson's; rows alone say 1 … 1
    alike = np.repeat([True, False], 500)
    wide = bound_share(alike, np.repeat(np.arange(10), 100), rng)
    narrow = bound_share(alike, np.arange(1000), rng)
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])


def test_figures_show_every_head_or_every_layer(monkeypatch):
    model = build("AM*2", vocab_size=32, d_model=16, n_heads=2).eval()
    drawings, lines = [], []
    found = recall.measure(Subject(TASK, model, BATCH))
    for most in (4, 3):
        monkeypatch.setattr(recall, "LINES", most)
        drawings.append(found[0].figure().to_dict())
        lines.append(drawings[-1]["layout"]["yaxis"]["ticktext"])
    assert [len(names) for names in lines] == [4, 2]
    assert lines[1][1] == "layer 1, highest head"
    assert len(drawings[0]["data"]) == 6
    ticks = [line["marker"] for line in drawings[0]["data"] if line["name"] == "a uniform row"]
    # An open line has the marker's colour; its outline's would not show.
    assert {(tick["symbol"], tick["color"]) for tick in ticks} == {("line-ns-open", MUTED)}
    assert to_plain(found[1])["split"] == "probe"


def test_without_pairs_it_does_not_apply():
    subject = Subject(TASK, mechanisms.untrained(), replace(BATCH, links={}))
    with pytest.raises(NotApplicableError, match="no value that is stored beside its key"):
        recall.measure(subject)
