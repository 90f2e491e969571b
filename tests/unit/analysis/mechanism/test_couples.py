"""Couples, moved tokens and what answers follow: each equals a loop over rows."""

import pytest
import torch

from analysis.base import Subject
from analysis.mechanism.couples import draw_couples, measure_followed, permute_tokens
from tasks.mqar import MQAR
from tests import mechanisms
from tests.unit.analysis.mechanism.planted import ROWS, make_generator


def test_couples_are_the_loop_over_rows():
    task = MQAR(seq_len=32, vocab_size=64).replace(n_pairs=(1, 4, 8))
    batch = task.batch(split="test", size=12)
    found = draw_couples(task, batch, make_generator())
    assert found is not None
    stored = [int((row >= 0).sum()) for row in batch.links["query_pos"]]
    kept = [row for row in range(12) if stored[row] >= 2]
    assert found.query.shape == (len(kept), 1, 2)
    assert found.valid.all()
    for i, row in enumerate(kept):
        clean: list[int] = batch.inputs[row].tolist()
        corrupt: list[int] = found.corrupt.inputs[i].tolist()
        assert found.clean.inputs[i].tolist() == clean
        keys: list[int] = found.key[i].flatten().tolist()
        assert len(set(keys)) == 2
        for key, other in (keys, keys[::-1]):
            assert corrupt[key] == clean[other]
        assert [j for j in range(32) if corrupt[j] != clean[j]] == sorted(keys)
        for j in range(2):
            query, key, value = (int(z[i, 0, j]) for z in (found.query, found.key, found.value))
            assert clean[query] == clean[key]
            assert value == key + 1
            assert batch.targets[row, query] == clean[value] == found.right[i, 0, j]
            assert task.oracle(found.corrupt)[i, query] == found.wrong[i, 0, j]


@pytest.mark.parametrize("link", ["key_pos", "value_pos"])
def test_permuted_rows_are_the_loop_over_pairs(link):
    task = MQAR(seq_len=32, vocab_size=64).replace(n_pairs=(1, 2, 8))
    batch = task.batch(split="test", size=12)
    found, given = permute_tokens(batch, link, make_generator())
    for row in range(12):
        expected = batch.inputs[row].tolist()
        places = [p for p in batch.links[link][row].tolist() if p >= 0]
        for pair, place in enumerate(places):
            expected[place] = batch.inputs[row, places[given[row, pair]]].item()
            assert given[row, pair] != pair or len(places) == 1
        assert found.inputs[row].tolist() == expected
        assert sorted(given[row, : len(places)].tolist()) == list(range(len(places)))


@torch.no_grad()
def test_what_answers_follow_is_the_loop_over_queries():
    for make, share in ((mechanisms.induction, (1, 0)), (mechanisms.positional, (0, 1))):
        model = make()
        found = measure_followed(Subject(mechanisms.TASK, model, ROWS), ROWS, make_generator())
        assert (found.key.value, found.position.value) == share
    model = mechanisms.direct()
    # The lower half of the values alone can be answered.
    model.head.weight[mechanisms.VOCAB * 3 // 4 :] = 0
    found = measure_followed(Subject(mechanisms.TASK, model, ROWS), ROWS, make_generator())
    rng = make_generator()
    keys, _ = permute_tokens(ROWS, "key_pos", rng)
    right = 0
    for row in range(len(ROWS.inputs)):
        query = ROWS.links["query_pos"][row]
        before, after = model(ROWS.inputs[row : row + 1])[0], model(keys.inputs[row : row + 1])[0]
        for q in query.tolist():
            now = mechanisms.TASK.oracle(keys)[row, q]
            right += bool(before[q].argmax() == ROWS.targets[row, q] and after[q].argmax() == now)
    assert 0 < right < ROWS.links["query_pos"].numel()
    assert found.key.value == pytest.approx(right / ROWS.links["query_pos"].numel())


def test_couples_do_not_count_where_their_keys_lie_at_the_later_positions():
    task = MQAR(seq_len=64, n_pairs=16, vocab_size=128)
    found = draw_couples(task, task.batch(split="test", size=6), make_generator())
    assert found is not None
    assert found.shift_values(0) is found
    later = found.shift_values(1)
    assert (later.value == found.value + 1).all()
    lost = 0
    for row in range(6):
        places = set(later.value[row].flatten().tolist())
        for c, keys in enumerate(found.key[row].tolist()):
            hit = bool(places & set(keys))
            assert later.valid[row, c] == (found.valid[row, c] and not hit)
            lost += hit
    assert 0 < lost < found.valid.numel()
    # Two positions later lies a value of the next pair, and no key.
    assert (found.shift_values(2).valid == found.valid).all()
