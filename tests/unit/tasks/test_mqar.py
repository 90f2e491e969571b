"""Hard MQAR: its roles, marginals, links, oracle, shortcuts and the limits of its options."""

from math import sqrt

import jaxtyping
import pytest
import torch

from tasks import TASKS
from tasks.base import IGNORE, accuracy
from tasks.mqar import FILLER, KEY, MQAR, QUERY, VALUE
from tests.statistics import assert_uniform


def test_known_by_name_with_defaults():
    task = TASKS["mqar"](seq_len=256, vocab_size=8192)
    assert task == MQAR()
    assert task.options == {
        "seq_len": 256,
        "vocab_size": 8192,
        "n_pairs": None,
        "power": 0.01,
        "fillers": "any",
    }
    assert isinstance(task, MQAR)
    assert task.pair_count == 64
    assert task.chance == 1 / 4096


@pytest.mark.parametrize("split", ["train", "test", "probe"])
def test_a_quarter_of_each_role_at_the_default(split: str):
    batch = MQAR().batch(split=split, size=4)
    counts = [(batch.roles == role).sum(1) for role in (KEY, VALUE, QUERY, FILLER)]
    assert all(count.tolist() == [64] * 4 for count in counts)


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


def test_zero_fillers():
    batch = MQAR(seq_len=64, n_pairs=4, fillers="zero").batch(size=8)
    assert (batch.inputs[batch.roles == FILLER] == 0).all()
    assert not batch.links["decoy"].any()


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


def test_mixture_picks_each_number_of_pairs_alike():
    batch = MQAR(seq_len=32).replace(n_pairs=(2, 4, 8)).batch(size=3_000)
    n_pairs = (batch.roles == KEY).sum(1)
    assert_uniform((n_pairs // 4), 0, 3)
    assert ((batch.links["query_pos"] >= 0).sum(1)).equal(n_pairs)
    for name in set(batch.links) - {"setting"}:
        link = batch.links[name]
        assert link.shape == (3_000, 8)
        assert ((link == -1) == (batch.links["key_pos"] == -1)).all()


def test_a_row_of_a_mixture_is_the_row_of_its_own_number_of_pairs():
    mixed = MQAR(seq_len=32).replace(n_pairs=(2, 8)).batch(size=20)
    for n_pairs in (2, 8):
        alone = MQAR(seq_len=32, n_pairs=n_pairs).batch(size=20)
        same = (mixed.roles == KEY).sum(1) == n_pairs
        assert mixed.inputs[same].equal(alone.inputs[same])


def test_splits_and_seeds_have_rows_of_their_own():
    task = MQAR(seq_len=32)
    rows = [
        tuple(row)
        for split in task.splits
        for seed in range(3)
        for row in task.batch(split=split, size=200, seed=seed).inputs.tolist()
    ]
    assert len(set(rows)) == len(task.splits) * 3 * 200


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 2}, r"seq_len=2: too short, must be ≥ 4"),
        ({"seq_len": 262144, "vocab_size": 2**20}, r"seq_len=262144: too long, must be ≤ 131072"),
        ({"seq_len": 33}, r"seq_len=33: must be even"),
        ({"vocab_size": 256}, r"vocab_size=256: must be > seq_len=256"),
        ({"vocab_size": 2**31}, r"vocab_size=2147483648: .* ≤ 1073741824"),
        ({"vocab_size": 301}, r"vocab_size=301: must be even"),
        ({"n_pairs": 0}, r"n_pairs=0: must be in 1 … 64"),
        ({"n_pairs": 65}, r"n_pairs=65: must be in 1 … 64 .*longer seq_len"),
        ({"n_pairs": (4, 65)}, r"n_pairs=65: must be in 1 … 64"),
        ({"n_pairs": ()}, r"n_pairs=\(\): must name at least one"),
        ({"power": 0.0}, r"power=0\.0: must be > 0"),
        ({"power": float("nan")}, r"power=nan: must be > 0 and finite"),
        ({"fillers": "none"}, r"fillers='none': must be one of any, fresh, zero"),
    ],
)
def test_bad_options_are_named(monkeypatch, options: dict, message: str):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        MQAR(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("fillers", ["any", "fresh", "zero"])
def test_cpu_and_cuda_agree(fillers):
    for task in (
        MQAR(fillers=fillers),
        MQAR(vocab_size=1000, fillers=fillers).replace(n_pairs=(4, 60)),
    ):
        here, there = task.batch(size=32), task.batch(size=32, device="cuda").to("cpu")
        assert here.inputs.equal(there.inputs)
        assert here.targets.equal(there.targets)
        assert here.roles.equal(there.roles)
        assert all(here.links[name].equal(there.links[name]) for name in here.links)


def test_targets_are_ignored_elsewhere():
    batch = MQAR(seq_len=64, n_pairs=4).batch(size=8)
    assert ((batch.targets == IGNORE) == (batch.roles != QUERY)).all()


def test_a_split_ends_before_the_next_begins():
    task = MQAR(seq_len=8, vocab_size=16)
    assert task.batch(start=2**36 - 1, size=1).inputs.shape == (1, 8)
    with pytest.raises(ValueError, match=f"a split has {2**36} rows"):
        task.batch(start=2**36, size=1)
