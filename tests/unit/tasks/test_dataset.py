"""A task's rows as a dataset: each row once, whatever shares them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import tasks.dataset
from tasks import TASKS
from tasks.base import IGNORE
from tasks.dataset import Rows

TASK = TASKS["induction"](seq_len=12, vocab_size=100)


class Worker:
    def __init__(self, number: int, workers: int):
        self.id, self.num_workers = number, workers


def batches(monkeypatch, rows: Rows, number: int, workers: int):
    monkeypatch.setattr(tasks.dataset, "get_worker_info", lambda: Worker(number, workers))
    return [batch["inputs"] for batch in rows]


@settings(max_examples=60)
@given(
    start=st.integers(0, 50),
    count=st.integers(0, 40),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    workers=st.integers(1, 3),
)
def test_every_row_comes_once_over_all_ranks_and_workers(
    start, count, batch_size, world_size, workers
):
    seen = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for rank in range(world_size):
            rows = Rows(
                TASK,
                batch_size=batch_size,
                start=start,
                stop=start + count,
                rank=rank,
                world_size=world_size,
            )
            for number in range(workers):
                seen += batches(monkeypatch, rows, number, workers)
    found = sorted(row for batch in seen for row in batch.tolist())
    expected = TASK.batch(start=start, size=count).inputs.tolist() if count else []
    assert found == sorted(expected)
    assert sum(len(batch) < batch_size for batch in seen) <= 1


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_ranks_order_does_not_depend_on_its_workers(monkeypatch, workers):
    rows = Rows(TASK, batch_size=2, stop=26, rank=1, world_size=2)
    shares = [batches(monkeypatch, rows, number, workers) for number in range(workers)]
    in_turn = [share[i] for i in range(len(shares[0])) for share in shares if i < len(share)]
    assert torch.cat(in_turn).equal(
        torch.cat([TASK.batch(start=start, size=2).inputs for start in range(2, 26, 4)])
    )


def test_links_come_along_when_asked_for():
    (batch,) = Rows(TASK, batch_size=8, stop=4, links=True)
    query = batch["targets"].gather(1, batch["links"]["query_pos"])
    assert (query != IGNORE).all()
    assert set(batch) == {"inputs", "targets", "roles", "links"}
    assert set(next(iter(Rows(TASK)))) == {"inputs", "targets", "roles"}


@pytest.mark.parametrize("name", ["mqar", "induction"])
def test_torchs_loader_with_workers_gives_the_same_batches(name):
    task = TASKS[name](**TASKS[name].presets["small"].options)
    rows = Rows(task, batch_size=4, stop=18, links=True)
    alone = list(DataLoader(rows, batch_size=None))
    shared = list(DataLoader(rows, batch_size=None, num_workers=2))
    assert [len(batch["inputs"]) for batch in shared] == [4, 4, 4, 4, 2]
    for one, other in zip(alone, shared, strict=True):
        for key in ("inputs", "targets", "roles"):
            assert one[key].equal(other[key])
        for key, link in one["links"].items():
            assert link.equal(other["links"][key])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "probe"}, "split='probe': must be one of train, test"),
        ({"batch_size": 0}, "batch_size=0: must be ≥ 1"),
        ({"start": -1}, "start=-1: must be in 0 …"),
        ({"start": 9, "stop": 8}, "start=9: must be in 0 … 8"),
        ({"stop": 2**36 + 1}, "stop=68719476737: must be in 0 … 68719476736"),
        ({"world_size": 0}, "world_size=0: must be ≥ 1"),
        ({"rank": 2, "world_size": 2}, "rank=2: must be in 0 … 1"),
        ({"rank": -1}, "rank=-1: must be in 0 … 0"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Rows(TASK, **options)
