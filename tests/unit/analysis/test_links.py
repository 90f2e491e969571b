"""Pairs of every task's links: whole ones first; rows that interventions made are no surprise."""

from dataclasses import replace

import numpy as np
import torch

from analysis.experts.held_answers import measure_held_answers
from analysis.links import find_links, find_pairs, has_pairs
from analysis.mechanism.swapped_keys import draw_couples, solve_rows
from lab.models import build
from tasks.compositional import Compositional
from tasks.copying import Copy
from tasks.flip_flop import FlipFlop
from tasks.memorize import Memorize


def test_what_lacks_a_key_is_no_pair_and_whole_pairs_come_first():
    task = Copy(seq_len=16)
    batch = task.batch(split="test", size=6)
    assert has_pairs(batch)
    assert (batch.links["key_pos"][:, 0] == -1).all()
    query, key, value = find_pairs(batch)
    for row in range(6):
        wanted = [
            triple
            for triple in zip(
                *(batch.links[f"{of}_pos"][row].tolist() for of in ("query", "key", "value")),
                strict=True,
            )
            if min(triple) >= 0
        ]
        found = torch.stack([query[row], key[row], value[row]], 1).tolist()
        assert found[: len(wanted)] == [list(triple) for triple in wanted]
        assert found[len(wanted) :] == [[-1, -1, -1]] * (len(found) - len(wanted))
        assert find_links(batch, row).queries.tolist() == [triple[0] for triple in wanted]


def test_rows_that_are_the_tasks_no_more_have_no_answers():
    task = Compositional(seq_len=24, n_pairs=4, vocab_size=16)
    batch = task.batch(size=3)
    inputs = batch.inputs.clone()
    inputs[1, :12:3] = 0  # none of the keys that the slots ask for is stored
    answers = solve_rows(task, replace(batch, inputs=inputs))
    assert (answers[[0, 2]] == task.oracle(batch)[[0, 2]]).all()
    assert (answers[1] == -100).all()


def test_pairs_that_are_asked_twice_are_in_one_couple_at_most():
    task = FlipFlop(seq_len=64, p_ignore=0.2)
    found = draw_couples(task, task.batch(size=12), np.random.default_rng(0))
    assert found is not None
    for row in range(len(found.key)):
        keys = found.key[row].flatten().tolist()
        assert len(set(keys)) == len(keys)
    # Every write has the same key token: to exchange two of them changes nothing.
    assert not found.valid.any()


def test_answers_of_one_fact_are_counted_where_facts_are_linked():
    task = Memorize(seq_len=24, n_facts=8, vocab_size=32)
    batch = task.batch(size=4)
    options = {"E.n_experts": 16, "E.k": 2}
    model = build("AE", vocab_size=32, d_model=16, options=options).eval()
    found = measure_held_answers(model, batch, 0, np.random.default_rng(0))
    assert found.kind_of == "fact"
    assert found.asked == int((batch.targets != -100).sum())
