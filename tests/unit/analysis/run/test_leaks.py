"""The leak check: silent on causal models, loud on one that sees later tokens or known rows."""

import pytest
import torch
from torch import nn

from analysis.base import Subject
from analysis.run import leaks
from lab.models import build
from tasks.mqar import MQAR
from tasks.word_problem import WordProblem


class SeesAll(nn.Module):
    """A mixer that adds the mean of the whole row, later tokens too."""

    def forward(self, x):
        return x + x.mean(1, keepdim=True)


def check(task, cheat: bool = False) -> leaks.LeakCheck:
    torch.manual_seed(0)
    model = build("AM SM", vocab_size=task.vocab_size, d_model=16).eval()
    if cheat:
        model.blocks[0].mixer = SeesAll()
    (found,) = leaks.measure(Subject(task, model, task.batch(split="test", size=8)))
    return found


def test_a_causal_model_does_not_leak():
    found = check(MQAR(seq_len=32, vocab_size=64))
    assert (found.leaks, found.changed, found.repeated, found.rows) == (False, 0, 0, 8)
    assert found.answers > 50
    assert found.behind > 0
    assert found.says.endswith("of 8 test rows, 0 are among the first 4,096 training rows.")


def test_a_model_that_sees_later_tokens_is_caught():
    found = check(MQAR(seq_len=32, vocab_size=64), cheat=True)
    assert found.leaks
    assert found.moved > leaks.MOVED
    assert found.says.startswith("The model sees later tokens")


@torch.no_grad()
def test_a_model_of_zeros_does_not_leak():
    task = MQAR(seq_len=16, vocab_size=32)
    model = build("AM SM", vocab_size=32, d_model=16).eval()
    for parameter in model.parameters():
        parameter.zero_()
    (found,) = leaks.measure(Subject(task, model, task.batch(split="test", size=8)))
    assert (found.leaks, found.moved) == (False, 0.0)


@pytest.mark.parametrize("tokens", [6, 12, 2**15], ids=["one row", "two rows", "all"])
def test_training_rows_are_searched_to_the_last_block(monkeypatch, tokens):
    monkeypatch.setattr(leaks, "TRAINED_ROWS", 5)
    monkeypatch.setattr(leaks, "BLOCK_TOKENS", tokens)
    task = WordProblem(group="Z2", seq_len=6)
    trained, tested = (
        task.batch(split=split, size=size).inputs.tolist()
        for split, size in (("train", 5), ("test", 8))
    )
    assert sum(row in trained[:4] for row in tested) == 1
    assert sum(row in trained for row in tested) == 2
    assert check(task).repeated == 2


@pytest.mark.parametrize("seq_len", [4, 32])
def test_some_answers_are_before_every_cut(seq_len):
    assert check(MQAR(seq_len=seq_len, vocab_size=64)).answers > 0
