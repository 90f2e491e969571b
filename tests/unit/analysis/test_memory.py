"""What memory is foretold covers what is taken, and grows as it should."""

import pytest
import torch
from torch import nn

from analysis.base import Subject
from analysis.matrices import rollout
from analysis.memory import (
    COPIES,
    FLOAT,
    LONGEST_ROLLED,
    ROLLED,
    check_memory,
    estimate_memory,
)
from analysis.rows import positions
from lab.bench.peak import measure_peak
from lab.models import LanguageModel, build
from tasks.mqar import MQAR


class Whole(nn.Module):
    """A mixer that can only give its whole matrix."""

    def __init__(self, d_model: int):
        super().__init__()

    def forward(self, x):
        return x

    def matrix(self, x):
        return torch.eye(x.shape[1]).expand(len(x), 1, -1, -1)

    def values(self, x):
        return x[:, None]

    def project(self, x, z):
        return z[:, 0]


@pytest.fixture
def foreign(monkeypatch):
    monkeypatch.setattr("lab.models.architectures.load_class", lambda path: Whole)
    return make("UM", model="tests:Whole")


def make(stack: str, d_model: int = 16, **more) -> LanguageModel:
    return build(stack, vocab_size=2**17, d_model=d_model, **more).eval()


def describe(seq_len: int) -> MQAR:
    return MQAR(seq_len=seq_len, vocab_size=2**17)


@pytest.mark.parametrize("stack", ["AM*2", "SE IE"])
def test_an_analysis_of_many_rows_takes_no_more_than_is_counted(stack):
    task, model = MQAR(seq_len=64, vocab_size=128), build(stack, vocab_size=128, d_model=32).eval()
    subject = Subject(task, model, task.batch(split="test", size=128))
    taken = measure_peak(lambda: positions.measure(subject))
    fixed, each = estimate_memory(model, task, ["positions"])
    assert 0.2 * (fixed + 128 * each) < taken < fixed + 128 * each


def test_a_whole_matrix_is_counted_only_where_a_mixer_has_nothing_else(foreign):
    task = describe(65_536)
    assert estimate_memory(foreign, task)[0] == COPIES * FLOAT * 65_536**2
    assert estimate_memory(make("AM"), task)[0] < 65_536**2


def test_matrices_that_are_multiplied_are_counted_where_they_are():
    model, shorter, longer = make("AM"), describe(LONGEST_ROLLED), describe(LONGEST_ROLLED + 2)
    multiplied = ROLLED * FLOAT * LONGEST_ROLLED**2
    assert estimate_memory(model, shorter)[0] == multiplied
    assert estimate_memory(model, shorter, ["rollout", "rows"])[0] == multiplied
    assert estimate_memory(model, shorter, ["rows"])[0] < multiplied
    assert estimate_memory(model, longer)[0] < multiplied
    assert estimate_memory(make("NM"), shorter)[0] < multiplied


@pytest.mark.parametrize("seq_len", [256, 512])
def test_multiplying_layers_takes_no_more_than_is_counted(seq_len):
    task = MQAR(seq_len=seq_len, vocab_size=64 * seq_len)
    model = build("AM*2", vocab_size=64 * seq_len, d_model=16).eval()
    subject = Subject(task, model, task.batch(split="test", size=1))
    taken = measure_peak(lambda: rollout.measure(subject))
    assert 0.2 * ROLLED < taken / (FLOAT * seq_len**2) < 1.1 * ROLLED


def test_how_many_rows_would_fit():
    model, task = make("AM"), describe(4096)
    fixed, each = estimate_memory(model, task)
    check_memory(model, task, 5, fixed + 5 * each)
    with pytest.raises(ValueError, match=r"rows=6 of 4,096 tokens .* 5 rows would fit"):
        check_memory(model, task, 6, fixed + 5 * each)
