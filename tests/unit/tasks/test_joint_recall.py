"""Joint recall: blocks, orders, marginals, lengthening, and the scores of its shortcuts."""

import pytest

from tasks.base import IGNORE, accuracy
from tasks.joint_recall import JointRecall
from tests.statistics import assert_uniform


def test_both_halves_hold_the_same_table():
    task = JointRecall(seq_len=80, n_contexts=3, n_keys=5, vocab_size=26)
    batch = task.batch(size=50)
    for row, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        halves = row[:33], row[34:67]
        assert row[33] == 1
        assert row[67:] == [0] * 13
        tables = []
        for half in halves:
            blocks = [half[i : i + 11] for i in range(0, 33, 11)]
            assert all(2 <= block[0] < 10 for block in blocks)
            assert all(10 <= key < 18 for block in blocks for key in block[1::2])
            tables.append(
                {block[0]: dict(zip(block[1::2], block[2::2], strict=True)) for block in blocks}
            )
        assert tables[0] == tables[1]
        assert len({frozenset(keys) for keys in tables[0].values()}) == 1
        asked = [34 + 11 * block + 1 + 2 * pair for block in range(3) for pair in range(5)]
        assert [p for p, target in enumerate(targets) if target != IGNORE] == asked
        assert [targets[p] for p in asked] == [row[p + 1] for p in asked]


def test_links_lead_to_the_same_context():
    task = JointRecall(seq_len=60, n_contexts=4, n_keys=3)
    batch = task.batch(size=50)
    asked = batch.inputs.gather(1, batch.links["query_pos"])
    assert batch.inputs.gather(1, batch.links["key_pos"]).equal(asked)
    named = batch.inputs[:, 29:57:7].repeat_interleave(3, 1)
    assert batch.inputs.gather(1, batch.links["context_pos"]).equal(named)
    inside = batch.links["key_pos"] - batch.links["context_pos"]
    assert set(inside.unique().tolist()) == {1, 3, 5}


def test_marginals_and_orders_are_uniform():
    batch = JointRecall(seq_len=44, n_contexts=3, n_keys=3, vocab_size=17).batch(size=20_000)
    assert_uniform(batch.inputs[:, 0], 2, 7)
    assert_uniform(batch.inputs[:, 8], 7, 12)
    assert_uniform(batch.inputs[:, 9], 12, 17)
    # Where the first context and the last key are asked for, and which stored pair is asked first.
    first = (batch.inputs[:, 22:43:7] == batch.inputs[:, :1]).long().argmax(1)
    assert_uniform(first, 0, 3)
    place = (batch.links["key_pos"][:, 0] - 1) // 7 * 3 + (
        batch.links["key_pos"][:, 0] - 1
    ) % 7 // 2
    assert_uniform(place, 0, 9)


def test_contexts_and_keys_shrink_together():
    task = JointRecall()
    sizes = [
        (part.options["n_contexts"], part.options["n_keys"])
        for part in (task.resize(t) for t in (128, 64, 32, 21))
    ]
    assert sizes == [(5, 4), (4, 3), (2, 2), (2, 2)]
    with pytest.raises(ValueError, match="seq_len=20: must be in 21"):
        task.resize(20)


def test_shortcuts_score_what_they_say():
    for options, expected in (
        ({}, (0.22, 0.18, 0.08)),
        (JointRecall.presets["small"].options, (0.42, 0.42, 0.22)),
    ):
        task = JointRecall(**options)
        batch = task.batch(split="test", size=500)
        names = "first key", "first match", "most recent match"
        found = [accuracy(task.shortcuts()[name](batch), batch.targets) for name in names]
        assert found == pytest.approx(expected, abs=0.03)
