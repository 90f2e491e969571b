"""Capo: names, biographies, knowledge, shortcuts."""

import pytest
import torch

from tasks.base import accuracy
from tasks.capo import Capo
from tests.statistics import assert_uniform

SMALL = Capo(seq_len=44, n_people=50, n_names=6, n_attributes=4, n_values=16, n_wordings=3)


def read_facts(task: Capo, split: str, seed: int) -> dict[tuple[str, str, str, str], str]:
    """Return the value of each name's attribute, which must be one alone."""
    batch, facts = task.batch(split=split, size=1_000, seed=seed), {}
    for row in batch.inputs:
        words = task.to_str_tokens(row)
        for begin in range(0, len(words) - task.length + 1, task.length):
            bio = words[begin : begin + task.length]
            cues = [cue.split(".")[0] for cue in bio[3::2]]
            assert sorted(cues) == [f"a{i}" for i in range(task.n_attributes)]
            for cue, value in zip(cues, bio[4::2], strict=True):
                assert value[1:].split(".")[0] == cue[1:]
                assert facts.setdefault((*bio[:3], cue), value) == value
    return facts


def test_splits_share_the_knowledge_and_seeds_do_not():
    facts = read_facts(SMALL, "train", 3)
    assert len(facts) == 50 * 4
    assert read_facts(SMALL, "test", 3) == facts
    other = read_facts(SMALL, "train", 4)
    assert {name[:3] for name in other} != {name[:3] for name in facts}
    assert SMALL.bits == 50 * 4 * 4


def test_people_orders_wordings_and_values_are_uniform():
    batch = SMALL.batch(size=10_000)
    assert_uniform(batch.links["person"][:, ::4], 0, 50)
    assert (batch.links["person"].view(-1, 4, 4).diff(dim=2) == 0).all()
    people = batch.links["person"][:, ::4].sort(1).values
    assert (people.diff(dim=1) > 0).all()
    assert_uniform(batch.links["attribute"][:, 0], 0, 4)
    cue = batch.inputs.gather(1, batch.links["query_pos"])
    assert_uniform(cue - SMALL.first_cue, 0, 12)
    large = Capo(seq_len=44, n_people=20_000, n_names=64, n_attributes=4, n_values=16)
    batch = large.batch(size=10_000)
    value = batch.targets.gather(1, batch.links["query_pos"])
    fact = batch.links["person"] * 4 + batch.links["attribute"]
    once = torch.stack((fact.flatten(), value.flatten())).unique(dim=1)
    assert once.shape[1] == len(fact.unique())
    assert_uniform(once[1] - large.first_value, 0, 64)


def test_links_lead_to_the_name():
    batch = SMALL.batch(size=100)
    name, query = batch.links["name_pos"], batch.links["query_pos"]
    first = batch.inputs.gather(1, name)
    assert ((first >= 1) & (first <= 6)).all()
    assert ((query - name - 3) % 2 == 0).all()
    assert ((query - name) < SMALL.length).all()


def test_shortcuts_know_a_part_of_the_name():
    """Against counts over all facts, from the rows that tell them."""
    facts = read_facts(SMALL, "train", 0)
    batch = SMALL.batch(split="test", size=2_000)
    for name, parts in (("most frequent value", 3), ("last name", 2), ("last two names", 1)):
        groups: dict[tuple[str, ...], list[str]] = {}
        for key, value in facts.items():
            groups.setdefault(key[parts:], []).append(value)
        right = sum(max(map(values.count, values)) for values in groups.values()) / len(facts)
        rule = SMALL.shortcuts()[name]
        assert accuracy(rule(batch), batch.targets) == pytest.approx(right, abs=0.02), name
    assert torch.equal(SMALL.oracle(batch), batch.targets)
