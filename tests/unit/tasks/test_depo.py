"""Depo: cycles, names, questions, links, and the scores of its shortcuts."""

from math import sqrt

import pytest
import torch

from tasks import counter
from tasks.base import IGNORE, accuracy
from tasks.depo import ANSWERS, MAX_HOPS, Depo
from tasks.nodes import draw_count, draw_names
from tests.statistics import assert_uniform

Name = tuple[int, ...]


def read(row: list[int], n_letters: int) -> tuple[list[Name], list[tuple[int, Name, Name]]]:
    """Return the names of the links, and (k, node, answer) of each question, by hand."""
    names: list[Name] = []
    name: Name = ()
    asked: list[int] = []
    for token in row:
        if 0 < token <= MAX_HOPS:
            asked.append(token)
        elif token > ANSWERS:
            name += (token,)
            if token > ANSWERS + n_letters:
                names.append(name)
                name = ()
    links, questions = names[: len(names) - 2 * len(asked)], names[len(names) - 2 * len(asked) :]
    return links, list(zip(asked, questions[::2], questions[1::2], strict=True))


@pytest.mark.parametrize("min_nodes", [None, 3])
def test_links_are_one_cycle_and_answers_are_k_links_on(min_nodes: int | None):
    task = Depo(seq_len=120, n_nodes=12, min_nodes=min_nodes, n_queries=5, hops=15, n_letters=4)
    sizes = set()
    for row in task.batch(size=200).inputs.tolist():
        links, questions = read(row, 4)
        link = dict(zip(links[::2], links[1::2], strict=True))
        node, seen = links[0], []
        while node not in seen:
            seen.append(node)
            node = link[node]
        assert len(seen) == len(links) // 2
        sizes.add(len(seen))
        assert len({node for _, node, _ in questions}) == min(5, len(seen))
        for hops, node, answer in questions:
            assert seen[(seen.index(node) + hops) % len(seen)] == answer
    assert sizes == ({12} if min_nodes is None else set(range(3, 13)))


def test_answers_are_asked_letter_by_letter():
    task = Depo(seq_len=100, n_nodes=5, n_queries=5, n_letters=3, min_name_len=2, max_name_len=4)
    batch = task.batch(size=50)
    names = ("query_pos", "answer_pos", "distance", "hops")
    for r, (row, targets) in enumerate(
        zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)
    ):
        _, questions = read(row, 3)
        asked = [p for p, target in enumerate(targets) if target != IGNORE]
        assert [targets[p] for p in asked] == [row[p + 1] for p in asked]
        assert [targets[p] for p in asked] == [t for *_, answer in questions for t in answer]
        found = torch.stack([batch.links[name][r] for name in names])[:, : len(asked)].tolist()
        assert found[0] == asked
        assert found[3] == [k for k, _, answer in questions for _ in answer]
        context = sum(len(name) for name in read(row, 3)[0])
        for query, answer, distance, _ in zip(*found, strict=True):
            assert (row[answer], distance) == (targets[query], query - answer)
            assert answer < context


def test_names_are_as_likely_as_if_drawn_one_after_the_other():
    word = counter.draw_words(1, 0, torch.arange(20_000), 6)
    names = draw_names(word, 2, 2, 1, 2)
    assert (names[:, 0] != names[:, 1]).any(1).all()
    short = (names[:, :, 1] == 0).double()
    # A name is one letter in half of the draws; the second is drawn again where it is the first.
    assert short[:, 0].mean().item() == pytest.approx(1 / 2, abs=5 * sqrt(1 / 4 / 20_000))
    again = (1 / 2) * (1 / 4) / (3 / 4) + (1 / 2) * (1 / 2) / (7 / 8)
    assert short[:, 1].mean().item() == pytest.approx(again, abs=5 * sqrt(1 / 4 / 20_000))
    assert_uniform(names[:, 0, 0][names[:, 0, 1] > 0], 1, 3)


def test_small_graphs_are_likelier_and_k_is_uniform():
    count = draw_count(counter.draw_words(1, 0, torch.arange(50_000), 1), 3, 16)
    weight = 1 / (torch.arange(3, 17) + 4.0)
    expected = 50_000 * weight / weight.sum()
    drawn = torch.bincount(count[:, 0] - 3, minlength=14)
    assert ((drawn - expected) ** 2 / expected).sum() < 13 + 5 * sqrt(26)
    batch = Depo(seq_len=60, n_nodes=9, n_queries=4, hops=6).batch(size=2_000)
    assert_uniform(batch.inputs[(batch.inputs > 0) & (batch.inputs <= MAX_HOPS)], 1, 7)
    fixed = Depo(seq_len=60, n_nodes=9, n_queries=4, hops=6, exact_hops=4).batch(size=50)
    assert set(fixed.inputs[fixed.inputs <= MAX_HOPS].tolist()) == {0, 4}


def test_shortcuts_score_what_they_say():
    for options, expected in (
        ({}, {"one hop": 0.14, "most recent match": 0.30, "a hop too few": 0.01}),
        (Depo.presets["small"].options, {"one hop": 0.5, "a hop too few": 0, "a hop too many": 0}),
    ):
        task = Depo(**options)
        batch = task.batch(split="test", size=500)
        for name, value in expected.items():
            found = accuracy(task.shortcuts()[name](batch), batch.targets)
            assert found == pytest.approx(value, abs=0.025), name
