"""Batches drawn several at a time are those drawn one by one."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tasks.reader
from tasks import TASKS
from tasks.base import MAX_ROWS, Batch, Task
from tasks.reader import BatchReader, count_tokens_ahead
from tasks.schedule import Schedule

TASK = TASKS["induction"](seq_len=12, vocab_size=100)
VARIED = {
    "lengths": TASKS["mqar"](seq_len=(16, 32), vocab_size=64),
    "schedule": TASKS["copy"](seq_len=Schedule(8, 20, 40), vocab_size=20),
}


def compare(found: Batch, expected: Batch) -> None:
    for name in ("inputs", "targets", "roles"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True
        )
    assert found.links.keys() == expected.links.keys()
    for name, link in expected.links.items():
        assert found.links[name].equal(link), name


def count_draws(monkeypatch: pytest.MonkeyPatch, task: Task) -> list[int]:
    """Return a list to which every later draw of the task's rows adds their number."""
    rows: list[int] = []
    generate = type(task).generate

    def count(self, split, numbers, seed):
        rows.append(len(numbers))
        return generate(self, split, numbers, seed)

    monkeypatch.setattr(type(task), "generate", count)
    return rows


@pytest.mark.parametrize("name", [*TASKS, *VARIED])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_task_reads_the_rows_it_draws(name, split):
    task = VARIED[name] if name in VARIED else TASKS[name](**TASKS[name].presets["small"].options)
    reader = BatchReader(task, size=3, split=split, seed=7)
    for start in range(0, 30, 3):
        compare(reader.read(start), task.batch(split=split, start=start, size=3, seed=7))


@settings(max_examples=25)
@given(
    starts=st.lists(st.integers(0, 60), max_size=12),
    size=st.integers(1, 5),
    stride=st.integers(1, 9) | st.none(),
    stop=st.integers(61, 80),
    tokens=st.integers(1, 400),
)
def test_any_order_stride_and_end(starts, size, stride, stop, tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.reader, "BLOCK_TOKENS", tokens)
        reader = BatchReader(TASK, size=size, stride=stride, stop=stop)
        in_turn = range(0, 61, stride or size)
        for start in [*in_turn, *starts, *in_turn]:
            expected = TASK.batch(start=start, size=min(size, stop - start))
            assert reader.read(start).inputs.equal(expected.inputs)


def test_it_draws_twice_as_many_each_time_up_to_a_block(monkeypatch):
    rows = count_draws(monkeypatch, TASK)
    monkeypatch.setattr(tasks.reader, "BLOCK_TOKENS", 16 * 12)
    reader = BatchReader(TASK, size=2)
    for start in range(0, 60, 2):
        reader.read(start)
    assert rows == [2, 4, 8, 16, 16, 16]


def test_what_is_held_ahead_is_what_is_counted(monkeypatch):
    monkeypatch.setattr(tasks.reader, "BLOCK_TOKENS", 200)
    reader = BatchReader(TASK, size=3)
    batches = [reader.read(start) for start in range(0, 60, 3)]
    held = max(b.inputs.untyped_storage().nbytes() for b in batches) // 8
    assert count_tokens_ahead(TASK, 3) == held - 3 * 12 == 4 * 36


def test_batches_of_one_block_share_no_place():
    reader = BatchReader(TASK, size=2)
    batches = [reader.read(start) for start in (0, 2, 4)]
    for before, after in pairwise(batches):
        kept = after.inputs.clone()
        before.inputs.zero_()
        assert after.inputs.equal(kept)


def test_there_are_no_rows_past_the_last():
    reader = BatchReader(TASK, size=4)
    assert len(reader.read(MAX_ROWS - 2).inputs) == 2
    for start in (-4, MAX_ROWS):
        with pytest.raises(ValueError, match=f"start={start}: must be in 0 … {MAX_ROWS - 1}"):
            reader.read(start)
    assert torch.equal(reader.read(0).inputs, TASK.batch(size=4).inputs)


def test_what_a_task_does_not_have_is_refused():
    with pytest.raises(ValueError, match="split='dev'"):
        BatchReader(TASK, size=4, split="dev")
    with pytest.raises(ValueError, match="size=0: must be ≥ 1"):
        BatchReader(TASK, size=0)
