"""Overwriting: the order of writes, links, marginals, shortcuts and the limits of its options."""

from math import comb, sqrt

import pytest
import torch

from tasks import TASKS
from tasks.base import IGNORE, accuracy
from tasks.overwrite import FILLER, KEY, QUERY, VALUE, Overwrite
from tests.statistics import assert_uniform


def test_known_by_name_with_defaults():
    task = TASKS["overwrite"]()
    assert task == Overwrite(seq_len=256, n_pairs=16, rewrites=3, spacing=None, vocab_size=8192)
    assert task.n_writes == 64
    assert task.chance == 1 / 4096


def test_roles_and_what_stands_there():
    batch = Overwrite().batch(size=4)
    counts = [(batch.roles == role).sum(1).tolist() for role in (KEY, VALUE, QUERY, FILLER)]
    assert counts == [[64] * 4, [64] * 4, [16] * 4, [112] * 4]
    assert (batch.inputs[batch.roles == FILLER] == 0).all()
    assert ((batch.targets == IGNORE) == (batch.roles != QUERY)).all()


def test_every_key_gets_as_many_values_all_distinct_and_is_asked_once():
    batch = Overwrite(n_pairs=8, vocab_size=70).batch(size=50)
    for row in batch.inputs.tolist():
        keys, values = row[:64:2], row[1:64:2]
        assert len(set(keys)) == 8
        assert all(keys.count(key) == 4 for key in keys)
        assert len(set(values)) == 32
        assert sorted(row[64:80:2]) == sorted(set(keys))


@pytest.mark.parametrize("spacing", [1, 2, 5, 7])
def test_groups_of_keys_are_written_in_rounds(spacing):
    task = Overwrite(n_pairs=7, rewrites=2, spacing=spacing)
    gaps: set[int] = set()
    for row in task.batch(size=200).inputs.tolist():
        keys = row[:42:2]
        while keys:
            size = min(spacing, len(keys) // 3)
            group, keys = keys[: 3 * size], keys[3 * size :]
            rounds = [set(group[i : i + size]) for i in range(0, 3 * size, size)]
            assert rounds[0] == rounds[1] == rounds[2]
            assert len(rounds[0]) == size
            gaps |= {group[i + 1 :].index(group[i]) + 1 for i in range(2 * size)}
    assert gaps == set(range(1, 2 * spacing))


def test_writes_come_in_any_order():
    """The first write is the asked key's latest once in W: position does not tell."""
    task = Overwrite(seq_len=32, n_pairs=3, rewrites=2, vocab_size=64)
    batch = task.batch(size=20_000)
    keys = batch.inputs[:, :18:2]
    for i, j in ((0, 1), (2, 7)):
        same = (keys[:, i] == keys[:, j]).double().mean().item()
        # Of 8 other writes 2 are of the same key.
        assert same == pytest.approx(1 / 4, abs=5 * sqrt(3 / 16 / 20_000))


@pytest.mark.parametrize("spacing", [4, None])
def test_links_are_what_a_loop_finds(spacing):
    task = Overwrite(seq_len=90, n_pairs=6, spacing=spacing, vocab_size=64)
    batch = task.batch(split="test", size=20)
    for i, row in enumerate(batch.inputs.tolist()):
        keys = row[:48:2]
        for q in range(6):
            link = {name: int(tensor[i, q]) for name, tensor in batch.links.items()}
            key = row[48 + 2 * q]
            latest = 23 - keys[::-1].index(key)
            assert link == {
                "query_pos": 48 + 2 * q,
                "key_pos": 2 * latest,
                "value_pos": 2 * latest + 1,
                "first_value_pos": 2 * keys.index(key) + 1,
                "distance": 48 + 2 * q - (2 * latest + 1),
            }
            assert int(batch.targets[i, link["query_pos"]]) == row[link["value_pos"]]


def test_marginals_are_uniform():
    task = Overwrite(seq_len=32, n_pairs=4, rewrites=1, spacing=4, vocab_size=23)
    batch = task.batch(size=20_000)
    for i in (0, 3, 7):
        assert_uniform(batch.inputs[:, 2 * i], 1, 11)
        assert_uniform(batch.inputs[:, 2 * i + 1], 11, 23)
    both = (batch.inputs[:, 0] - 1) * 12 + batch.inputs[:, 1] - 11
    assert_uniform(both, 0, 120)
    for q in (0, 3):
        assert_uniform((batch.links["value_pos"][:, q] - 9) // 2, 0, 4)
        assert_uniform((batch.links["first_value_pos"][:, q] - 1) // 2, 0, 4)


@pytest.mark.parametrize("spacing", [8, None])
def test_shortcuts_score_what_they_say(spacing):
    task = Overwrite(n_pairs=8, spacing=spacing)
    batch = task.batch(size=1_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    # A write m from the end, m < 8, is the latest of its key if the other three are before it.
    latest = sum(comb(31 - m, 3) / comb(31, 3) for m in range(8)) / 8
    assert scores["first written"] == 0
    assert scores["last value"] == pytest.approx(1 / 8, abs=1e-9)
    for name, expected in (
        ("written value", 1 / 4),
        ("context value", 1 / 32),
        ("position only", 1 / 8 * (1 if spacing else latest)),
    ):
        spread = 5 * sqrt(expected * (1 - expected) / 8_000)
        assert scores[name] == pytest.approx(expected, abs=spread), name


def test_a_written_value_is_any_of_the_key_asked():
    task = Overwrite(n_pairs=6, vocab_size=64)
    batch = task.batch(size=500)
    answers = task.shortcuts()["written value"](batch)
    which: list[int] = []
    for row, answer in zip(batch.inputs.tolist(), answers.tolist(), strict=True):
        for query in range(48, 60, 2):
            written = [row[p + 1] for p in range(0, 48, 2) if row[p] == row[query]]
            which.append(written.index(answer[query]))
    assert_uniform(torch.tensor(which), 0, 4)


def test_without_rewrites_the_first_value_is_the_latest():
    task = Overwrite(rewrites=0)
    batch = task.batch(size=10)
    assert accuracy(task.shortcuts()["first written"](batch), batch.targets) == 1
    assert batch.links["first_value_pos"].equal(batch.links["value_pos"])


def test_stale_values_move_away_from_the_latest_with_spacing():
    def stale(spacing: int) -> float:
        links = Overwrite(spacing=spacing).batch(size=50).links
        return (links["value_pos"] - links["first_value_pos"]).double().mean().item()

    assert stale(1) == 6  # three rewrites, each a write later
    # On average one round of `spacing` writes lies between a key's write and its next.
    assert stale(4) == pytest.approx(24, abs=0.5)
    assert stale(16) == pytest.approx(96, abs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 3}, r"seq_len=3: must be in 4 … "),
        ({"rewrites": -1}, r"rewrites=-1: must be in 0 … 126 \(seq_len / 2 − 2\)"),
        ({"rewrites": 127}, r"rewrites=127: must be in 0 … 126"),
        ({"n_pairs": 0}, r"n_pairs=0: must be in 1 … 25"),
        ({"n_pairs": 26}, r"n_pairs=26: must be in 1 … 25 \(seq_len / \(2·rewrites \+ 4\)\)"),
        ({"n_pairs": (4, 26)}, r"n_pairs=26: must be in 1 … 25"),
        ({"spacing": 0}, r"spacing=0: must be in 1 … 16 \(n_pairs\)"),
        ({"spacing": 17}, r"spacing=17: must be in 1 … 16"),
        ({"vocab_size": 127}, r"vocab_size=127: must be in 128 … .*as many values as writes"),
        ({"rewrites": 0, "vocab_size": 33}, r"vocab_size=33: must be in 34 … "),
        ({"vocab_size": 2**31}, r"vocab_size=2147483648: must be in 128 … 1073741824"),
    ],
)
def test_bad_options_are_named(unchecked, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Overwrite(**options)


def test_the_smallest_vocabulary_serves():
    batch = Overwrite(vocab_size=128).batch(size=3)
    assert torch.unique(batch.inputs[:, 1:128:2]).tolist() == list(range(64, 128))
