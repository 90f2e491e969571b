"""Laws of every hard MQAR row, whatever the options."""

from typing import Any, get_args

import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.base import IGNORE, Batch, accuracy
from tasks.mixture import Mixture
from tasks.mqar import FILLER, KEY, MQAR, QUERY, VALUE, Fillers


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a small task's; small vocabularies make decoys and out-of-range images common."""
    seq_len = 2 * draw(st.integers(2, 24))
    counts = st.integers(1, seq_len // 4)
    return {
        "seq_len": seq_len,
        "vocab_size": seq_len + 2 * draw(st.integers(1, 40)),
        "n_pairs": draw(st.none() | counts | st.lists(counts, min_size=1, max_size=3).map(tuple)),
        "power": draw(st.sampled_from([0.01, 0.5, 1.0, 2.0])),
        "fillers": draw(st.sampled_from(get_args(Fillers))),
    }


def tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.inputs, batch.targets, batch.roles, *batch.links.values()]


def pair_counts(task: MQAR) -> list[int]:
    parts = task.parts if isinstance(task, Mixture) else (task,)
    return [part.pair_count for part in parts if isinstance(part, MQAR)]


splits = st.sampled_from(MQAR.splits)
seeds = st.integers(-(2**63), 2**64)


@given(chosen=options(), split=splits, seed=seeds, start=st.integers(0, 2**30))
def test_a_row_depends_on_its_number_alone(chosen, split, seed, start):
    task = MQAR(**chosen)
    whole = tensors(task.batch(split=split, start=start, size=9, seed=seed))
    one_by_one = [
        tensors(task.batch(split=split, start=start + i, size=1, seed=seed)) for i in range(9)
    ]
    backwards = tensors(task.generate(split, torch.arange(start, start + 9).flip(0), seed))
    for k, tensor in enumerate(whole):
        assert tensor.equal(torch.cat([row[k] for row in one_by_one]))
        assert tensor.equal(backwards[k].flip(0))


@given(chosen=options(), split=splits, seed=seeds)
def test_rows_are_laid_out_as_described(chosen, split, seed):
    task = MQAR(**chosen)
    batch = task.batch(split=split, size=4, seed=seed)
    half = task.vocab_size // 2
    for row, target, role in zip(
        batch.inputs.tolist(), batch.targets.tolist(), batch.roles.tolist(), strict=True
    ):
        n_pairs = role.count(KEY)
        assert n_pairs in pair_counts(task)
        assert role[: 2 * n_pairs] == [KEY, VALUE] * n_pairs
        assert role.count(VALUE) == role.count(QUERY) == n_pairs
        assert role.count(FILLER) == task.seq_len - 3 * n_pairs
        keys, values = row[: 2 * n_pairs : 2], row[1 : 2 * n_pairs : 2]
        assert len(set(keys)) == len(set(values)) == n_pairs
        assert set(keys) <= set(range(1, half))
        assert set(values) <= set(range(half, task.vocab_size))
        asked = [t for t in range(task.seq_len) if role[t] == QUERY]
        assert all(t % 2 == 0 for t in asked)
        assert sorted(row[t] for t in asked) == sorted(keys)
        pairs = dict(zip(keys, values, strict=True))
        assert target == [pairs[row[t]] if t in asked else IGNORE for t in range(task.seq_len)]
        fillers = {token for token, r in zip(row, role, strict=True) if r == FILLER}
        assert fillers <= set(range(task.vocab_size))
        if chosen["fillers"] == "fresh":
            assert not fillers & {*keys, *values}
        if chosen["fillers"] == "zero":
            assert fillers <= {0}


@given(chosen=options(), split=splits, seed=seeds)
def test_oracle_is_right(chosen, split, seed):
    task = MQAR(**chosen)
    batch = task.batch(split=split, size=4, seed=seed)
    assert accuracy(task.oracle(batch), batch.targets) == 1


@given(chosen=options(), seed=seeds)
def test_oracle_answers_only_queries_when_every_slot_is_filled(chosen, seed):
    task = MQAR(**chosen)
    full = MQAR(seq_len=task.seq_len // 4 * 4, vocab_size=task.vocab_size)
    batch = full.batch(size=4, seed=seed)
    assert full.oracle(batch).equal(batch.targets)


@given(chosen=options(), split=splits, seed=seeds)
def test_links_against_a_loop(chosen, split, seed):
    task = MQAR(**chosen)
    batch = task.batch(split=split, size=4, seed=seed)
    most = max(pair_counts(task))
    for n, (row, role) in enumerate(zip(batch.inputs.tolist(), batch.roles.tolist(), strict=True)):
        n_pairs = role.count(KEY)
        expected: dict[str, list[int]] = {name: [] for name in set(batch.links) - {"setting"}}
        for i in range(n_pairs):
            key, value_pos = row[2 * i], 2 * i + 1
            query_pos = next(t for t in range(task.seq_len) if role[t] == QUERY and row[t] == key)
            decoy = any(
                row[t] == key and role[t] == FILLER for t in range(value_pos + 1, query_pos)
            )
            found = {
                "query_pos": query_pos,
                "key_pos": 2 * i,
                "value_pos": value_pos,
                "store_slot": i,
                "query_slot": (query_pos - 2 * n_pairs) // 2,
                "distance": query_pos - value_pos,
                "decoy": int(decoy),
            }
            for name, number in found.items():
                expected[name].append(number)
        for name, numbers in expected.items():
            assert batch.links[name][n].tolist() == numbers + [-1] * (most - n_pairs), name
