"""Step times: the faster precision is taken, remembered, and measured anew when that fails."""

from dataclasses import replace

import pytest
import torch

from lab.config import ModelConfig, Runtime, TrainConfig
from lab.lengthening import list_stages
from lab.machine.measurements import read, remember
from lab.training import step_time
from lab.training.experiment import carry_out
from lab.training.extension import extend
from lab.training.runs import Run
from lab.training.step_time import KIND, StepTime, measure
from tasks.mqar import MQAR

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path) -> Run:
    config = TrainConfig(batch_size=2, lengthen=True)
    return Run(tmp_path / "run", MQAR(seq_len=32, vocab_size=64), ModelConfig(d_model=8), config)


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Plant how long a step takes, by precision and row length; tells what was asked."""
    asked, planted = [], {}

    def name(models, batches, precision):
        return precision, batches[0].inputs.shape[1]

    def seconds(step):
        asked.append(step[0])
        planned = planted[step]
        return planned[torch.get_num_threads()] if isinstance(planned, dict) else planned

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(step_time, "record_gradients", name)
    monkeypatch.setattr(step_time, "_time_step", seconds)
    monkeypatch.setattr(step_time, "list_precisions", lambda device: ("fp32", "bf16"))
    monkeypatch.setattr(step_time, "SECONDS", 0)
    monkeypatch.setattr(step_time, "count_free_cores", step_time.count_cores)
    return asked, planted


def measure_run(run: Run, precision: str = "auto", threads: int | None = None) -> StepTime:
    return measure(run, list_stages(run.task, run.train), CPU, precision, threads)[0]


def plant(timed, seconds: float | dict[int, float]) -> None:
    """Let every step take so long; by the number of threads, if that matters."""
    timed[1].update({(p, t): seconds for p in ("fp32", "bf16") for t in (8, 32)})


@pytest.mark.parametrize(
    ("bf16", "chosen"),
    # The two stages count together; 3 % and less are not worth the rounding.
    [((0.5, 1.0), "bf16"), ((2.0, 0.5), "bf16"), ((0.99, 2.0), "fp32"), ((4.0, 4.0), "fp32")],
)
def test_the_precision_whose_first_and_last_steps_are_faster_is_taken(run, timed, bf16, chosen):
    times = {"fp32": (1.0, 2.0), "bf16": bf16}
    for precision, (first, last) in times.items():
        timed[1].update({(precision, 8): first, (precision, 32): last})
    assert measure_run(run) == StepTime(chosen, 1, *times[chosen])


def test_what_was_measured_is_remembered_by_run_and_precision(run, timed):
    asked, _ = timed
    plant(timed, 1.0)
    first = measure_run(run)
    count = len(asked)
    assert measure_run(run) == first
    assert len(asked) == count
    assert measure_run(run, "bf16") == StepTime("bf16", 1, 1.0, 1.0)
    wider = Run(run.path, run.task, ModelConfig(d_model=16), run.train)
    before = len(asked)
    measure_run(wider)
    assert len(asked) > before > count


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    # 3 % and less are not worth a second thread, which other processes may want.
    [({1: 1.0, 2: 0.6}, 2), ({1: 1.0, 2: 1.2}, 1), ({1: 1.0, 2: 0.98}, 1)],
)
def test_the_number_of_threads_with_the_fastest_steps_is_taken(
    run, timed, monkeypatch, seconds, chosen
):
    monkeypatch.setattr(step_time, "list_thread_counts", lambda device: [1, 2])
    plant(timed, seconds)
    assert measure_run(run).threads == chosen
    assert torch.get_num_threads() == 1
    # What the user asks for is not compared with other numbers.
    assert measure_run(run, threads=2) == StepTime("fp32", 2, seconds[2], seconds[2])


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])])
def test_numbers_of_threads_are_powers_of_two_and_the_most(monkeypatch, most, counts):
    monkeypatch.setattr(torch, "get_num_threads", lambda: most)
    assert step_time.list_thread_counts(CPU) == counts


def test_beside_other_processes_nothing_is_remembered(run, timed, monkeypatch):
    monkeypatch.setattr(step_time, "list_thread_counts", lambda device: [1, 2])
    monkeypatch.setattr(step_time, "count_cores", lambda: 2)
    monkeypatch.setattr(step_time, "count_free_cores", lambda: 1)
    plant(timed, {1: 1.0, 2: 0.5})
    assert measure_run(run) == StepTime("fp32", 1, 1.0, 1.0, disturbed=True)
    assert read(KIND) == {}


DAMAGED = [
    None,
    {"precision": "fp32"},
    {"precision": "int3", "threads": 1, "first": 1, "last": 1},
    {"precision": "fp32", "threads": 1, "first": 0, "last": 1},
    {"precision": "fp32", "threads": 0, "first": 1, "last": 1},
    {"precision": "fp32", "threads": "1", "first": 1, "last": 1},
]


@pytest.mark.parametrize("content", ["", [], 1, *([each] for each in DAMAGED)])
def test_times_that_cannot_be_read_are_measured_anew(run, timed, content):
    plant(timed, 1.0)
    found = measure_run(run)
    (key,) = read(KIND)
    remember(KIND, key, content)
    assert measure_run(run) == found
    assert StepTime(**read(KIND)[key][0]) == found


def test_a_run_keeps_the_threads_that_it_began_with(run):
    short = replace(run.train, max_steps=2, test_rows=2, lengthen=False)
    two_steps = replace(run, train=short)
    carry_out(two_steps, Runtime(threads=2))
    assert torch.get_num_threads() == 1
    assert run.load_state(CPU).threads == 2
    chosen = []
    carry_out(extend(two_steps, 3), Runtime(), lambda plan: chosen.append(plan.best.threads))
    assert chosen == [2]


def test_a_real_step_takes_time_and_leaves_no_gradient(run):
    model, stage = run.build(), list_stages(run.task, run.train)[0]
    (found,) = step_time.find_fastest(model, [stage, stage], [("fp32", 1)], 0)
    assert found.total > 0
    assert all(p.grad is None for p in model.parameters())
