"""A known mechanism gets its label; where an interval includes a threshold it is undecided."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.base import NotApplicableError, Subject
from analysis.links import PAIR_LINKS
from analysis.mechanism import classify, measure
from analysis.mechanism.couples import Followed, Measured
from analysis.mechanism.effects import Edited, Restored
from analysis.plain import to_plain
from tasks.base import IGNORE, Batch
from tests import mechanisms
from tests.unit.analysis.cases.mechanism import edited
from tests.unit.analysis.mechanism.planted import MAKERS, measure_planted


@pytest.mark.parametrize("name", MAKERS)
def test_a_planted_mechanism_gets_its_label(name):
    found, _ = measure_planted(name)
    assert name.startswith(found.label)
    assert to_plain(found)["label"] == found.label


@pytest.mark.parametrize("name", ["direct", "induction"])
def test_edges_are_blocked_and_values_exchanged_where_a_convolution_put_them(name):
    suffix = " two positions late" + " in one block" * (name == "direct")
    found, edited = measure_planted(name + suffix)
    assert edited is not None
    # Without its edge a query has no answer: half of the margin is left.
    assert edited.left[0, -1] == pytest.approx(0.5, abs=0.05)
    assert edited.left[2, -1] == pytest.approx(0.0, abs=0.1)
    assert edited.placebo[[0, 2], -1] == pytest.approx(1.0, abs=0.05)
    assert edited.followed[-1] == 1
    layer = str(edited.layers[-1])
    assert f"query → value blocked in layer {layer} (0." in edited.says
    assert (
        f"exchanging them in layer {layer} turns 100.0 % of the answers into the other"
        in edited.says
    )
    rows = edited.numbers().rows
    assert rows[0][:2] == ("query → what lies two positions after the value", layer)
    if name == "induction":
        assert edited.left[1, 0] == pytest.approx(0.5, abs=0.05)
        assert rows[1][:2] == ("what lies two positions after the value → key", "0")
        assert "what lies two positions after each value's position gathers its key" in found.says


def make_followed(key: float, position: float, half: float = 0.02) -> Followed:
    def make_measured(value: float) -> Measured:
        return Measured("", value, (value - half, value + half))

    either = key + position
    return Followed(
        *map(make_measured, (key, position, either, position / either if either else np.nan))
    )


def make_restored(
    value: float, key: float = 0.0, query: float = 0.0, placebo=0.0, half=0.02
) -> Restored:
    inner = np.array([key, value, query, 0.0, placebo])[:, None]
    share = np.concatenate([np.eye(5)[:, :1], inner, np.eye(5)[:, 2:3]], 1)
    interval = np.stack([share - half, share + half], -1)
    return Restored(np.array([0, 1, 2]), share, interval, 16)


@pytest.mark.parametrize(
    ("followed", "restored", "label"),
    [
        (make_followed(0.9, 0.0), make_restored(0.9), "induction"),
        (make_followed(0.3, 0.0), make_restored(0.9), "induction"),
        (make_followed(0.21, 0.0), make_restored(0.9), "undecided"),
        (make_followed(0.0, 0.0), make_restored(0.9), "undecided"),
        (make_followed(0.9, 0.0), make_restored(0.66), "undecided"),
        (make_followed(0.9, 0.0), make_restored(0.5), "mixed"),
        (make_followed(0.9, 0.0), make_restored(0.34), "undecided"),
        (make_followed(0.9, 0.0), make_restored(0.1, key=0.9), "direct"),
        (make_followed(0.9, 0.0), make_restored(0.1, query=0.9), "direct"),
        (make_followed(0.9, 0.0), make_restored(0.1, key=0.5, query=0.5), "undecided"),
        (make_followed(0.9, 0.0), make_restored(0.9, placebo=0.4), "undecided"),
        (make_followed(0.9, 0.0), make_restored(np.nan), "undecided"),
        (make_followed(0.9, 0.0), make_restored(0.9, half=np.nan), "undecided"),
        (make_followed(0.9, 0.0), None, "undecided"),
        (make_followed(0.1, 0.8), None, "positional"),
        (make_followed(0.4, 0.4), make_restored(0.9), "mixed"),
        (make_followed(0.6, 0.3), make_restored(0.9), "undecided"),
        (make_followed(0.9, 0.0, half=np.nan), make_restored(0.9), "undecided"),
    ],
)
def test_the_label_abstains_where_an_interval_reaches_over_a_threshold(followed, restored, label):
    assert classify(followed, restored, None)[0] == label


def make_edited(values: float, others: float, half: float = 0.02) -> Edited:
    """Return what exchanging values, and other positions, leaves in a model's one block."""
    shares = [np.array([[1.0], [0.5], [share]]) for share in (values, others)]
    ends = [np.stack([share - half, share + half], -1) for share in shares]
    none = np.zeros(1)
    return Edited(np.zeros(1, np.int64), shares[0], ends[0], shares[1], ends[1], none, none, 8)


@pytest.mark.parametrize(
    ("edited", "label"),
    [
        (make_edited(0.0, 1.0), "direct"),
        (make_edited(0.34, 1.0), "undecided"),
        (make_edited(1.0, 1.0), "undecided"),
        (make_edited(0.0, 0.6), "undecided"),
        (make_edited(0.0, 1.0, half=np.nan), "undecided"),
        (None, "undecided"),
    ],
)
def test_one_block_is_direct_only_where_the_answer_goes_with_the_values(edited, label):
    ends = np.eye(5)[:, [0, 2]]
    restored = Restored(np.array([0, 1]), ends, np.stack([ends, ends], -1), 16)
    found, reason, told = classify(make_followed(0.9, 0.0), restored, edited)
    assert found == label
    assert (found == "undecided") == ("no inner depth" in reason)
    assert len(told) == (2 if edited is None else 4)


def test_a_label_from_some_depths_says_of_how_many():
    shares = np.stack([make_restored(0.1, key=0.9).share[:, 1]] * 4, 1)
    ends = np.stack([shares - 0.02, shares + 0.02], -1)
    for last, said in ((3, "at any depth"), (12, "at the 2 of 11 depths tried")):
        restored = Restored(np.array([0, 1, 2, last]), shares, ends, 16)
        label, reason, _ = classify(make_followed(0.9, 0.0), restored, None)
        assert (label, reason) == ("direct", f"no value's position carries its key {said}")


def drop_links(batch: Batch) -> Batch:
    return replace(batch, links={})


def ask_for_constants(batch: Batch) -> Batch:
    """Queries that ask for nothing stored: their answers do not change with the keys."""
    links = {name: batch.links[name] for name in PAIR_LINKS}
    targets = torch.where(batch.targets == IGNORE, IGNORE, 0)
    return replace(batch, targets=targets, links=links)


@pytest.mark.parametrize(
    ("task", "change", "why"),
    [
        (mechanisms.TASK, drop_links, "no value that is stored beside its key"),
        (replace(mechanisms.TASK, n_pairs=1), lambda batch: batch, "two pairs"),
        (mechanisms.TASK, ask_for_constants, "do not change places"),
    ],
)
def test_where_there_is_nothing_to_exchange_it_says_so(task, change, why):
    batch = change(task.batch(split="test", size=3))
    with pytest.raises(NotApplicableError, match=why):
        measure(Subject(task, mechanisms.untrained(), batch))


def test_an_edit_without_effect_is_seldom_said_to_leave_less():
    rng = np.random.default_rng(0)
    named = sum(
        "blocked in layer" in edited(tuple(rng.normal(1, 0.07, 2))).says for _ in range(400)
    )
    assert named <= 20
