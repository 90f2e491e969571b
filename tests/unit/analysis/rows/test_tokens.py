"""The row token by token: heads against their matrices, answers against the model's."""

import base64
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.base import Subject
from analysis.mixing import collect_mixers
from analysis.rows import tokens
from lab.models import build
from tasks.mqar import MQAR


def subject_of(stack: str = "AM SM", seq_len: int = 32) -> Subject:
    torch.manual_seed(0)
    task = MQAR(seq_len=seq_len, vocab_size=2 * seq_len)
    model = build(stack, vocab_size=task.vocab_size, d_model=16, n_heads=2).eval()
    return Subject(task, model, task.batch(split="test", size=4))


def test_shares_are_those_of_the_matrix():
    subject = subject_of()
    (found,) = tokens.measure(subject)
    mixers = collect_mixers(subject.model, subject.batch[:1])
    expected = torch.cat([mixer.matrix(0) for mixer in mixers]).detach().numpy()
    expected /= np.abs(expected).sum(-1, keepdims=True)
    assert [(looks.layer, looks.head) for looks in found.heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for looks, matrix in zip(found.heads, expected, strict=True):
        dense = np.zeros_like(matrix)
        np.put_along_axis(dense, looks.sources, looks.shares, axis=1)
        np.testing.assert_allclose(dense, np.tril(matrix), atol=1e-6)


@pytest.mark.parametrize("planted", [0, 1])
def test_a_row_with_right_and_wrong_answers_is_preferred(planted, monkeypatch):
    subject = subject_of()
    found = tokens.scored(subject.model, subject.batch)
    answers = found.answers.clone()
    targets = torch.where(found.rows == 2, answers, (answers + 1) % 64) if planted else answers
    if planted:
        targets[(found.rows == 2).nonzero()[0]] += 1
    monkeypatch.setattr(tokens, "scored", lambda *_: replace(found, targets=targets))
    (row,) = tokens.measure(subject)
    assert row.title.startswith(f"Row {2 if planted else 0} of the test split, the first")


def test_a_long_row_shows_questions_with_their_pairs_the_wrong_ones_first(monkeypatch):
    """Shares of what is not shown are counted, so that no head seems to look at nothing."""
    monkeypatch.setattr(tokens, "MOST_TOKENS", 16)
    subject = subject_of()
    right = tokens.scored(subject.model, subject.batch)
    answers = right.answers.clone()
    last = (right.rows == 0).nonzero()[-2:, 0]
    answers[last] = (answers[last] + 1) % 64
    targets = subject.batch.targets.index_put((right.rows, right.positions), answers)
    subject = replace(subject, batch=replace(subject.batch, targets=targets))
    (found,) = tokens.measure(subject)
    assert found.right == found.scored - 2
    shown, links = np.array(found.positions), subject.batch.links
    assert len(shown) == len(found.tokens) == 16
    pairs = np.stack([links[name][0] for name in ("query_pos", "key_pos", "value_pos")], 1)
    pairs = pairs[np.argsort(pairs[:, 0])]
    complete = pairs[np.isin(pairs, shown).all(1)].tolist()
    assert sorted(shown[np.array(found.links)].tolist()) == complete
    for pair in (*pairs[-2:], *pairs[:3]):  # two that are wrong, then the first
        assert np.isin(pair, shown).all()
    (mixer, _) = collect_mixers(subject.model, subject.batch[:1])
    matrix = mixer.matrix(0)[1].detach().numpy()
    looks = found.heads[1]
    dense = np.zeros((16, 16))
    np.put_along_axis(dense, looks.sources, looks.shares, axis=1)
    np.testing.assert_allclose(dense, matrix[shown][:, shown], atol=1e-6)
    np.testing.assert_allclose(dense.sum(1) + looks.hidden, 1, atol=1e-6)
    assert looks.hidden.max() > 0.1
    table = found.numbers()
    assert table is not None
    assert table.rows[0] == ("tokens", "16", "32")


def test_a_long_row_without_pairs_ends_with_its_last_question_and_keeps_its_largest_entries(
    monkeypatch,
):
    monkeypatch.setattr(tokens, "MOST_TOKENS", 24)
    monkeypatch.setattr(tokens, "ENTRIES", 4 * 24 * 6)
    subject = subject_of()
    subject = replace(subject, batch=replace(subject.batch, links={}))
    (found,) = tokens.measure(subject)
    assert (len(found.tokens), len(found.answers), len(found.roles)) == (24, 24, 24)
    last = int((subject.batch.targets[0] != -100).nonzero()[-1])
    assert found.positions == tuple(range(last - 23, last + 1))
    shown = found.figure().row
    assert shown["tokens"][0] == str(int(subject.batch.inputs[0, found.positions[0]]))
    packed = shown["heads"][0]["shares"]
    shares = np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<i2") / tokens.FULL
    np.testing.assert_allclose(shares.reshape(24, 6), found.heads[0].shares, atol=1e-4)


def test_a_model_without_matrices_still_shows_its_answers():
    (found,) = tokens.measure(subject_of("NM"))
    assert found.heads == ()
    assert sum(map(bool, found.answers)) == found.scored
    assert found.figure().row["heads"] == []
