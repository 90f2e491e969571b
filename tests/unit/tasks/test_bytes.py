"""Bytes: offsets, splits, links, oracle, tables, the pinned text and the limits of its options."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tasks import shortcuts
from tasks.base import Batch, accuracy
from tasks.next_byte import CONTEXT, Bytes
from tasks.ngrams import NGram
from tests.statistics import assert_uniform


@pytest.fixture
def tale(tmp_path: Path) -> str:
    """Write a text of some 5,000 bytes."""
    path = tmp_path / "tale.txt"
    path.write_text(" ".join(f"{i} cats sat on {i * i} mats." for i in range(200)))
    return str(path)


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
    monkeypatch.setattr(shortcuts, "CONTEXT_TOKENS", 2**12)
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


def test_an_n_gram_gives_each_byte_the_probability_that_its_definition_says(tale: str):
    task = Bytes(path=tale, seq_len=12)
    (name, measure), batch = *task.surprisals().items(), task.batch(split="test", size=2)
    begin, end = task.find_span(task.corpus, "train")
    text = Path(tale).read_bytes()[begin:end]
    after: dict[bytes, Counter[int]] = {}
    for k in range(5):
        for i in range(max(k, 1), len(text)):
            after.setdefault(text[i - k : i], Counter())[text[i]] += 1

    def share(context: bytes, byte: int) -> float:
        shorter = share(context[1:], byte) if context else 1 / 256
        if context not in after:
            return shorter
        found = after[context]
        return (found[byte] + len(found) * shorter) / (found.total() + len(found))

    bits = measure(batch).exp2().reciprocal()
    assert name == "interpolated 5-gram"
    for row, targets, found in zip(batch.inputs, batch.targets, bits, strict=True):
        read = bytes(row.tolist())
        for t, byte in enumerate(targets.tolist()):
            context = read[max(0, t - 3) : t + 1]
            assert found[t] == pytest.approx(share(context, byte), rel=1e-9)
            assert sum(share(context, other) for other in range(256)) == pytest.approx(1)


def test_an_n_gram_finds_the_entropy_of_what_its_contexts_decide():
    """A fair coin decides each token of four: one that the last one leaves open, or the other."""
    torch.manual_seed(0)
    steps = torch.randint(1, 3, (200_000,))
    text = steps.cumsum(0) % 4
    seen, new = text[:150_000], text[150_000:]
    batch = Batch(new[None, :-1], new[None, 1:], new[None, :-1] * 0, {})
    for n, entropy in ((1, 2.0), (2, 1.0), (3, 1.0)):
        found = NGram.count(seen, n, 4).measure_bits(batch)
        assert found.mean().item() == pytest.approx(entropy, abs=0.01)
