"""Bytes: offsets, splits, links, oracle, tables, the pinned text and the limits of its options."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tasks import TASKS, next_byte
from tasks.base import accuracy
from tasks.next_byte import CONTEXT, Bytes
from tests.statistics import assert_uniform


@pytest.fixture
def tale(tmp_path: Path) -> str:
    """Write a text of some 5,000 bytes."""
    path = tmp_path / "tale.txt"
    path.write_text(" ".join(f"{i} cats sat on {i * i} mats." for i in range(200)))
    return str(path)


def test_known_by_name_with_defaults():
    task = TASKS["bytes"]()
    assert isinstance(task, Bytes)
    assert task.vocab_size == 256
    assert task.chance == 1 / 256
    assert task.corpus.size > 2**20


def test_rows_are_of_the_text_and_targets_what_follows(tale: str):
    content = Path(tale).read_bytes()
    task = Bytes(path=tale, seq_len=20)
    for split in task.splits:
        batch = task.batch(split=split, size=50)
        for row, offset in enumerate(batch.links["offset"][:, 0].tolist()):
            assert bytes(batch.inputs[row].tolist()) == content[offset : offset + 20]
            assert bytes(batch.targets[row].tolist()) == content[offset + 1 : offset + 21]
        assert (batch.roles == 0).all()
        assert batch.links["query_pos"].equal(torch.arange(20).expand(50, -1))
        assert accuracy(task.oracle(batch), batch.targets) == 1


def test_offsets_are_uniform_and_no_row_reaches_over_the_border(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("a" * 100)
    task = Bytes(path=str(path), seq_len=10, test_share=0.2)
    train = task.batch(size=14_000).links["offset"]
    test = task.batch(split="test", size=2_000).links["offset"]
    validation = task.batch(split="validation", size=1_000).links["offset"]
    # Rows of 11 bytes in bytes 0 … 63, 64 … 79 and 80 … 99.
    assert_uniform(train, 0, 54)
    assert_uniform(validation - 64, 0, 6)
    assert_uniform(test - 80, 0, 10)


def test_a_row_of_every_byte_of_a_split(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijklmnopqrst")
    task = Bytes(path=str(path), seq_len=4, test_share=0.5)
    assert bytes(task.batch(size=1).inputs[0].tolist()) == b"abcd"
    assert bytes(task.batch(split="validation", size=1).inputs[0].tolist()) == b"fghi"
    assert {bytes(row) for row in task.batch(split="test", size=99).inputs.tolist()} == {
        b"klmn",
        b"lmno",
        b"mnop",
        b"nopq",
        b"opqr",
        b"pqrs",
    }


def test_offsets_go_beyond_31_bits(tmp_path: Path):
    path = tmp_path / "huge.txt"
    path.write_text("text " * 2**14)
    os.truncate(path, 2**36)
    task = Bytes(path=str(path), seq_len=1, test_share=0.5)
    offset = task.batch(size=4_000).links["offset"]
    assert_uniform(offset >> 29, 0, 32)
    assert_uniform(offset & 63, 0, 64)
    assert (task.batch(split="test", size=100).links["offset"] >= 2**35).all()


@pytest.mark.parametrize(
    ("rule", "order"), [("unigram", 0), ("bigram", 1), ("five bytes", CONTEXT)]
)
def test_tables_are_what_was_most_frequent(tale: str, monkeypatch, rule: str, order: int):
    monkeypatch.setattr(next_byte, "TABLE_BYTES", 2**12)
    task = Bytes(path=tale, seq_len=2**8)
    train, batch = task.batch(size=2**4), task.batch(split="test", size=2)
    seen: dict[bytes, Counter[int]] = {}
    for inputs, targets in zip(train.inputs.tolist(), train.targets.tolist(), strict=True):
        text = bytes(inputs)
        for n in range(order + 1):
            for position in range(max(0, n - 1), len(text)):
                behind = seen.setdefault(text[position + 1 - n : position + 1], Counter())
                behind[targets[position]] += 1
    predicted = task.shortcuts()[rule](batch)
    for row, answers in zip(batch.inputs.tolist(), predicted.tolist(), strict=True):
        for position, answer in enumerate(answers):
            behind = bytes(row[max(0, position + 1 - order) : position + 1]) if order else b""
            while behind not in seen:
                behind = behind[1:]
            most = seen[behind]
            assert answer == min(most, key=lambda byte: (-most[byte], byte))


def test_longer_contexts_tell_more():
    task = Bytes()
    batch = task.batch(split="test", size=200)
    unigram, bigram, five = (
        accuracy(rule(batch), batch.targets) for rule in task.shortcuts().values()
    )
    assert 0.1 < unigram < bigram - 0.04 < five - 0.2 < 0.6


@pytest.mark.parametrize(
    ("token", "text"),
    [(97, "a"), (126, "~"), (10, "⏎"), (9, "⇥"), (32, "␣"), (0, "x00"), (127, "x7f"), (233, "xe9")],
)
def test_text_of_a_byte(token: int, text: str):
    assert Bytes().format_token(token) == text


def test_options_pin_the_text(tale: str, monkeypatch):
    monkeypatch.chdir(Path(tale).parent)
    task = Bytes(path="tale.txt", seq_len=16)
    options = json.loads(json.dumps(task.options))
    assert options["path"] == os.path.realpath(tale)
    assert len(options["digest"]) == 16
    monkeypatch.chdir("/")
    assert Bytes(**options) == task
    assert task.replace(seq_len=8).options["digest"] == task.digest
    Path(tale).write_text("another tale " * 100)
    for refused in (lambda: Bytes(**options), lambda: task.batch(size=1), lambda: task.corpus):
        with pytest.raises(
            ValueError, match=r"^digest=\w{16}: path='.*tale.txt' has changed since"
        ):
            refused()


def test_a_text_that_was_only_touched_is_the_same(tale: str):
    task = Bytes(path=tale, seq_len=16)
    before = task.batch(size=4)
    os.utime(tale, ns=(1, 1))
    assert task.batch(size=4).inputs.equal(before.inputs)


def test_another_path_has_a_digest_of_its_own(tale: str):
    default = Bytes(seq_len=16)
    task = default.replace(path=tale)
    assert task == Bytes(path=tale, seq_len=16)
    assert task.replace(path=None) == default
    with pytest.raises(ValueError, match=r"^digest=0123: path=.*has changed since"):
        default.replace(path=tale, digest="0123")


def test_texts_may_be_mixed(tale: str):
    task = TASKS["bytes"](path=(tale, None), seq_len=16)
    assert Bytes(**task.options) == task
    batch = task.batch(size=50)
    assert set(batch.links["setting"][:, 0].tolist()) == {0, 1}
    assert accuracy(task.oracle(batch), batch.targets) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, r"seq_len=0: must be in 1 … 1048576"),
        ({"test_share": 0.0}, r"test_share=0\.0: must be in 0\.001 … 0\.9"),
        ({"test_share": 0.95}, r"test_share=0\.95: must be in"),
        ({"test_share": float("nan")}, r"test_share=nan: must be in"),
        ({"path": "nowhere.txt"}, r"path='nowhere\.txt': No such file"),
        ({"digest": ""}, r"digest=: path=None has changed since"),
        (
            {"path": __file__, "seq_len": 10_000},
            r"path=.*too short, \d+ of its \d+ bytes are train, must be ≥ seq_len \+ 1 = 10001",
        ),
        ({"path": __file__, "seq_len": 2_000}, r"path=.* bytes are test, must be ≥"),
    ],
)
def test_bad_options_are_named(options: dict, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        Bytes(**options)
