"""What memory is foretold covers what is taken, and grows as it should."""

import pytest
import torch
from torch import nn

from analysis import memory_bench, positions, rollout
from analysis.base import Subject
from analysis.memory import (
    COPIES,
    FLOAT,
    LONGEST_ROLLED,
    ROLLED,
    check_memory,
    estimate_memory,
)
from lab.machine.allocation import measure_peak, measure_whole_peak
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


def test_rows_and_width_cost_in_proportion():
    small, wide, task = make("AM"), make("AM", d_model=64), describe(4096)
    base, one, nine = (estimate_memory(small, task, rows).total for rows in (0, 1, 9))
    assert nine - base == pytest.approx(9 * (one - base), rel=0.05)
    assert estimate_memory(wide, task, 9).total - base > 3 * (nine - base)


@pytest.mark.parametrize("stack", ["AM*2", "SE IE"])
def test_an_analysis_of_many_rows_takes_what_few_foretell(stack):
    task, model = MQAR(seq_len=64, vocab_size=128), build(stack, vocab_size=128, d_model=32).eval()
    subject = Subject(task, model, task.batch(split="test", size=128))
    taken = measure_peak(lambda: positions.measure(subject))
    foretold = estimate_memory(model, task, 128).growth.count_bytes(128)
    assert 0.9 * taken < foretold < 1.5 * taken


def test_a_whole_matrix_is_counted_only_where_a_mixer_has_nothing_else(foreign):
    task = describe(65_536)
    assert estimate_memory(foreign, task, 1).total > COPIES * FLOAT * 65_536**2
    assert estimate_memory(make("AM"), task, 1).total < 65_536**2


def test_matrices_that_are_multiplied_are_counted_where_they_are():
    model, shorter, longer = make("AM"), describe(LONGEST_ROLLED), describe(LONGEST_ROLLED + 2)
    multiplied = ROLLED * FLOAT * LONGEST_ROLLED**2
    assert estimate_memory(model, shorter, 1).fixed == multiplied
    assert estimate_memory(model, shorter, 1, ["rollout", "rows"]).fixed == multiplied
    assert estimate_memory(model, shorter, 1, ["rows"]).fixed < multiplied
    assert estimate_memory(model, longer, 1).fixed < multiplied
    assert estimate_memory(make("NM"), shorter, 1).fixed < multiplied


@pytest.mark.parametrize("seq_len", [256, 512])
def test_multiplying_layers_takes_no_more_than_is_counted(seq_len):
    task = MQAR(seq_len=seq_len, vocab_size=64 * seq_len)
    model = build("AM*2", vocab_size=64 * seq_len, d_model=16).eval()
    subject = Subject(task, model, task.batch(split="test", size=1))
    taken = measure_whole_peak(lambda: rollout.measure(subject))
    assert 0.4 * ROLLED < taken / (FLOAT * seq_len**2) < 1.1 * ROLLED


def test_analyses_of_a_run_are_estimated_and_carried_out(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(memory_bench, "examine", seen.append)
    tiny = memory_bench.AnalysedRun(memory_bench.ANALYSED[0].setting.shrink())
    assert tiny.estimate() > 0
    tiny.prepare(tmp_path)()
    # A tiny run goes first, so that what Python imports is not counted.
    assert [subject.run.path.name for subject in seen] == ["tiny", "run"]
    assert {len(subject.batch.inputs) for subject in seen} == {tiny.setting.rows}


def test_how_many_rows_would_fit():
    model, task = make("AM"), describe(4096)
    limit = estimate_memory(model, task, 5).total
    check_memory(model, task, 5, limit)
    with pytest.raises(ValueError, match=r"rows=6 of 4,096 tokens .* 5 rows would fit"):
        check_memory(model, task, 6, limit)
