"""Accuracy by position and role against loops; what is said only where intervals part."""

import numpy as np
import pytest
import torch

from analysis.base import NotApplicableError, Subject
from analysis.rows.positions import MOST_BINS, AccuracyByPlace, measure
from analysis.statistics.comparisons import Bins, bin_accuracy, describe_contrast
from lab.intervals import wilson
from lab.models import build
from tasks.copying import Copy
from tasks.induction import Induction
from tasks.word_problem import WordProblem


def subject(task, rows: int = 12) -> Subject:
    model = build("AM", vocab_size=task.vocab_size, d_model=16).eval()
    return Subject(task, model, task.batch(split="test", size=rows))


@torch.no_grad()
@pytest.mark.parametrize(
    "task", [WordProblem(group="Z2", seq_len=40), Copy(seq_len=24, vocab_size=3)]
)
def test_bins_are_the_loop_over_scored_positions(task):
    of = subject(task)
    (found,) = measure(of)
    assert isinstance(found, AccuracyByPlace)
    answers = of.model(of.batch.inputs).argmax(-1)
    rows, positions = (of.batch.targets != -100).nonzero(as_tuple=True)
    right = (answers == of.batch.targets)[rows, positions].tolist()
    assert (found.rows, found.scored) == (12, len(right))
    assert found.accuracy == pytest.approx(np.mean(right))
    assert found.position is not None
    assert len(found.position.first) <= MOST_BINS
    assert found.position.count.sum() == len(right)
    for first, last, share in zip(
        found.position.first, found.position.last, found.position.accuracy, strict=True
    ):
        inside = [first <= p <= last for p in positions.tolist()]
        assert share == pytest.approx(np.mean(np.array(right)[inside]))
    roles = of.batch.roles[rows, positions].tolist()
    assert (found.role is None) == (len(set(roles)) == 1)
    if found.role is not None:
        for i, role in enumerate(sorted(set(roles))):
            mine = [r for r, of_role in zip(right, roles, strict=True) if of_role == role]
            assert found.roles[i] == task.role_names[role]
            assert found.role.accuracy[i] == pytest.approx(np.mean(mine))
            assert found.role.count[i] == len(mine)


def test_rows_that_are_scored_at_one_place_have_nothing_to_compare():
    with pytest.raises(NotApplicableError, match="at position 15 alone, whose role is query"):
        measure(subject(Induction(seq_len=16)))
    (found,) = measure(subject(Induction(seq_len=16).replace(seq_len=(8, 16))))
    assert isinstance(found, AccuracyByPlace)
    assert found.position is not None
    assert found.position.first.tolist() == [7, 15]


def test_rows_that_go_wrong_together_widen_the_interval():
    right = np.repeat([True, False], 40)
    number, rng = np.zeros(80, np.int64), np.random.default_rng(0)
    alike = bin_accuracy(number, np.arange(2), right, np.repeat(np.arange(4), 20), rng)
    apart = bin_accuracy(number, np.arange(2), right, np.arange(80), rng)
    assert np.ptp(alike.interval) > 2 * np.ptp(apart.interval)
    assert describe_contrast(alike, "position", "positions") == "no position stands out"


@pytest.mark.parametrize(("low", "least", "most"), [(0.9, 0, 0.05), (0.6, 0.9, 1)])
def test_a_contrast_among_many_bins_is_seldom_due_to_chance(low: float, least: float, most: float):
    rng, shown = np.random.default_rng(0), 0
    chances = np.array([low, *[0.9] * 9])
    for _ in range(200):
        share = rng.binomial(60, chances) / 60
        interval = np.array([wilson(float(one), 60) for one in share])
        ends = np.arange(10)
        shown += describe_contrast(Bins(ends, ends, share, interval, ends), "bin", "bins") != (
            "no bin stands out"
        )
    assert least <= shown / 200 <= most


def test_a_bin_of_few_answers_hides_no_contrast():
    ends, counts = np.arange(4), np.array([500, 100, 2, 1])
    share = np.array([0.996, 0.626, 1.0, 0.0])
    intervals = [wilson(float(one), int(n)) for one, n in zip(share, counts, strict=True)]
    found = Bins(ends, ends, share, np.array(intervals), counts)
    assert describe_contrast(found, "distance", "distances") == (
        "99.6 % at distance 0 against 62.6 % at distance 1"
    )
