"""Step times: the faster precision is taken, remembered, and measured anew when that fails."""

import json

import pytest
import torch

from lab.config import ModelConfig, TrainConfig
from lab.lengthening import list_stages
from lab.training import step_time
from lab.training.runs import Run
from lab.training.step_time import StepTime, get_cache_file, measure
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

    def seconds(model, batch, precision):
        asked.append(precision)
        return planted[precision, batch.inputs.shape[1]]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(step_time, "_time_step", seconds)
    monkeypatch.setattr(step_time, "list_precisions", lambda device: ("fp32", "bf16"))
    monkeypatch.setattr(step_time, "SECONDS", 0)
    return asked, planted


def measure_run(run: Run, precision: str = "auto") -> StepTime:
    return measure(run, list_stages(run.task, run.train), CPU, precision)


@pytest.mark.parametrize(
    ("bf16", "chosen"),
    # The two stages count together; 3 % and less are not worth the rounding.
    [((0.5, 1.0), "bf16"), ((2.0, 0.5), "bf16"), ((0.99, 2.0), "fp32"), ((4.0, 4.0), "fp32")],
)
def test_the_precision_whose_first_and_last_steps_are_faster_is_taken(run, timed, bf16, chosen):
    times = {"fp32": (1.0, 2.0), "bf16": bf16}
    for precision, (first, last) in times.items():
        timed[1].update({(precision, 8): first, (precision, 32): last})
    assert measure_run(run) == StepTime(chosen, *times[chosen])


def test_what_was_measured_is_remembered_by_run_and_precision(run, timed):
    asked, planted = timed
    planted.update(dict.fromkeys([("fp32", 8), ("bf16", 8), ("fp32", 32), ("bf16", 32)], 1.0))
    first = measure_run(run)
    count = len(asked)
    assert measure_run(run) == first
    assert len(asked) == count
    assert measure_run(run, "bf16") == StepTime("bf16", 1.0, 1.0)
    wider = Run(run.path, run.task, ModelConfig(d_model=16), run.train)
    before = len(asked)
    measure_run(wider)
    assert len(asked) > before > count


IMPOSSIBLE = '{"x": {"precision": "int3", "first": 1, "last": 1}}'
ZERO = '{"x": {"precision": "fp32", "first": 0, "last": 1}}'


@pytest.mark.parametrize(
    "content", ["", "[]", '{"x": 1}', '{"x": {"precision": "fp32"}}', IMPOSSIBLE, ZERO]
)
def test_a_cache_that_cannot_be_read_is_made_anew(run, timed, content):
    timed[1].update(dict.fromkeys([("fp32", 8), ("bf16", 8), ("fp32", 32), ("bf16", 32)], 1.0))
    get_cache_file().parent.mkdir(parents=True)
    get_cache_file().write_text(content)
    found = measure_run(run)
    assert list(json.loads(get_cache_file().read_text()).values()) == [vars(found)]


def test_a_cache_that_cannot_be_written_is_done_without(run, timed, tmp_path):
    timed[1].update(dict.fromkeys([("fp32", 8), ("bf16", 8), ("fp32", 32), ("bf16", 32)], 1.0))
    (tmp_path / "cache").write_text("in the way")
    assert measure_run(run).precision == "fp32"


def test_a_real_step_takes_time_and_leaves_no_gradient(run):
    model = run.build()
    batch = run.task.batch(size=2)
    assert step_time._time_step(model, batch, "fp32") > 0
    assert all(p.grad is None for p in model.parameters())
