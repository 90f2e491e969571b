"""What a run chooses by timing its step: a precision and threads, again when steps become slow."""

from dataclasses import replace

import pytest
import torch

from lab.config import ModelConfig, Runtime, TrainConfig
from lab.training import speed
from lab.training.experiment import carry_out
from lab.training.loop import Row
from lab.training.run import Run
from lab.training.speed import Pace, StepTime, measure_choices
from tasks.mqar import MQAR

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path) -> Run:
    config = TrainConfig(batch_size=2, lengthen=True, precision="fp32")
    return Run(tmp_path / "run", MQAR(seq_len=32, vocab_size=64), ModelConfig(d_model=8), config)


@pytest.fixture
def plant(monkeypatch):
    """Return what plants how long a step takes, by precision, row length and threads."""
    clock, planted = [0.0], {}

    def record(differentiate, model, batch, precision):
        def step():
            clock[0] += planted[precision, batch.inputs.shape[1], torch.get_num_threads()]
            return torch.zeros(())

        return step

    monkeypatch.setattr(speed, "record_gradients", record)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(speed, "list_precisions", lambda device: ("fp32", "bf16"))
    return planted.update


def make_times(**seconds: tuple[float, float]) -> dict[tuple[str, int, int], float]:
    """Return times by choice, such as fp32_1=(of short rows, of long rows)."""
    return {
        (name[:4], length, int(name[5:])): at
        for name, both in seconds.items()
        for length, at in zip((8, 32), both, strict=True)
    }


SLOW = (4.0, 4.0)


@pytest.mark.parametrize(
    ("times", "chosen"),
    # Short and long rows count together; 5 % and less are not worth another choice.
    [
        ({"fp32_1": (1.0, 2.0), "bf16_1": (0.5, 1.0)}, ("bf16", 1, 1.5)),
        ({"fp32_1": (1.0, 2.0), "bf16_1": (2.0, 0.5)}, ("bf16", 1, 2.5)),
        ({"fp32_1": (1.0, 2.0), "fp32_2": (0.9, 2.0)}, ("fp32", 1, 3.0)),
        ({"fp32_1": (1.0, 2.0), "fp32_2": (0.5, 1.5)}, ("fp32", 2, 2.0)),
    ],
)
def test_the_fastest_choice_is_taken_if_it_is_worth_while(run, plant, times, chosen):
    every = dict.fromkeys(("fp32_1", "fp32_2", "bf16_1", "bf16_2"), SLOW) | times
    plant(make_times(**every))
    best, *others = measure_choices(run, CPU, "auto", [1, 2])
    assert best == StepTime(*chosen)
    assert [other.seconds for other in others] == sorted(other.seconds for other in others)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])])
def test_numbers_of_threads_are_powers_of_two_and_the_most(monkeypatch, most, counts):
    monkeypatch.setattr(torch, "get_num_threads", lambda: most)
    assert speed.list_thread_counts(CPU) == counts


def make_row(step: int, seconds: float, seq_len: int = 32) -> Row:
    return Row(step, seq_len, 1.0, 0.0, 1e-3, 1.0, seconds, seconds)


def test_slow_steps_are_noticed_once_and_longer_rows_are_not_slow():
    pace = Pace()
    usual = [pace.is_slow(make_row(step, 0.1)) for step in range(20)]
    longer = [pace.is_slow(make_row(step, 1.0, 64)) for step in range(20)]
    assert not any(usual + longer)
    slow = [pace.is_slow(make_row(step, 3.5, 64)) for step in range(20)]
    # A single slow step is not noticed; once the last five are, their pace is the usual one.
    assert slow == [False, False, True] + [False] * 17


def test_threads_are_chosen_again_when_steps_become_slow(run, monkeypatch):
    chosen = iter((2, 1))

    def measure(run, device, precision, counts):
        return [StepTime(precision, next(chosen), 1.0)]

    class SlowAtThree(Pace):
        def is_slow(self, row):
            return row.step == 3

    monkeypatch.setattr("lab.training.experiment.measure_choices", measure)
    monkeypatch.setattr("lab.training.experiment.Pace", SlowAtThree)
    short = replace(run, train=replace(run.train, max_steps=5, test_rows=2, lengthen=False))
    seen = []
    carry_out(short, Runtime(), on_row=lambda row: seen.append(torch.get_num_threads()))
    assert seen == [2, 2, 2, 1, 1]
    assert torch.get_num_threads() == 1
    assert short.load_state(CPU).threads == 1


def test_a_resumed_run_keeps_the_threads_that_it_began_with(run):
    short = replace(run.train, max_steps=2, test_rows=2, lengthen=False)
    carry_out(replace(run, train=short), Runtime(threads=2))
    longer = Run.open(run.path).set_limit(3)
    chosen = []
    carry_out(longer, Runtime(), lambda plan: chosen.append(plan.best.threads))
    assert chosen == [2]
