"""Hard MQAR: its roles, marginals, links, oracle, shortcuts and the limits of its options."""

from math import sqrt

import pytest
import torch

from tasks.base import accuracy
from tasks.mqar import FILLER, MQAR
from tests.statistics import assert_uniform


def test_marginals_are_uniform():
    task = MQAR(seq_len=32, n_pairs=6, vocab_size=64)
    batch = task.batch(size=20_000)
    for i in (0, 3, 5):
        assert_uniform(batch.inputs[:, 2 * i], 1, 32)
        assert_uniform(batch.inputs[:, 2 * i + 1], 32, 64)
    pair = batch.inputs[:, 0] * 64 + batch.inputs[:, 1]
    assert_uniform(torch.unique(pair, return_inverse=True)[1], 0, 31 * 32)
    for position in (13, 31):
        assert_uniform(batch.inputs[:, position], 0, 64)
    filler = batch.inputs[(batch.roles == FILLER)]
    assert_uniform(filler, 0, 64)


def test_fresh_fillers_are_uniform_over_what_is_left():
    task = MQAR(seq_len=16, n_pairs=4, vocab_size=18, fillers="fresh")
    batch = task.batch(size=5_000)
    stored, filler = batch.inputs[:, :8], batch.inputs[:, 9::2]
    assert not (filler[:, :, None] == stored[:, None]).any()
    used = torch.zeros(len(stored), 18).scatter_(1, stored, 1.0)
    rank = (1 - used).cumsum(1).long().gather(1, filler) - 1
    assert_uniform(rank, 0, 10)


def test_early_keys_draw_early_slots_but_not_in_the_probe():
    """Order correlates with store order at .54 when every slot is filled."""
    task = MQAR(seq_len=2048)

    def correlation(split: str) -> float:
        links = task.batch(split=split, size=64).links
        both = torch.stack([links["store_slot"].flatten(), links["query_slot"].flatten()])
        return torch.corrcoef(both.double())[0, 1].item()

    assert correlation("train") == pytest.approx(0.54, abs=0.02)
    # 32,768 nearly independent pairs: the standard deviation is 1/√32768.
    assert abs(correlation("probe")) < 5 / sqrt(64 * 512)


def test_most_recent_match_falls_for_decoys_alone():
    task = MQAR(seq_len=2048)
    batch = task.batch(split="test", size=64)
    recent = task.shortcuts()["most recent match"](batch)
    assert accuracy(recent, batch.targets) == pytest.approx(0.97, abs=0.005)
    links = batch.links
    wrong = (recent != batch.targets).gather(1, links["query_pos"])
    # What follows a decoy may happen to be the value; nothing else makes the rule right or wrong.
    assert not (wrong & (links["decoy"] == 0)).any()
    assert wrong.sum().item() == pytest.approx(links["decoy"].sum().item(), rel=0.01)


def test_shortcuts_score_what_they_say():
    task = MQAR(seq_len=64, n_pairs=16)
    batch = task.batch(size=2_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    spread = 5 * sqrt(1 / 16 / (2_000 * 16))
    assert scores["context value"] == pytest.approx(1 / 16, abs=spread)
    assert scores["last value"] == pytest.approx(1 / 16, abs=1e-9)
    assert 1.5 / 16 < scores["position only"] < 2 / 16


def test_a_batch_without_its_last_columns_is_answered():
    task = MQAR(seq_len=64, n_pairs=1)
    whole = task.batch(size=3)
    trimmed = whole.trim()
    t = trimmed.inputs.shape[1]
    assert t < 64
    for rule in (task.oracle, *task.shortcuts().values()):
        assert rule(trimmed).equal(rule(whole)[:, :t])
    assert accuracy(task.oracle(trimmed), trimmed.targets) == 1


def test_a_split_ends_before_the_next_begins():
    task = MQAR(seq_len=8, vocab_size=16)
    assert task.batch(start=2**36 - 1, size=1).inputs.shape == (1, 8)
    with pytest.raises(ValueError, match=f"a split has {2**36} rows"):
        task.batch(start=2**36, size=1)
