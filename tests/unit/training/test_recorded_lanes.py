"""Recorded steps of lanes are those that each training takes alone.

Without a GPU a replay is imitated, as for one training (`test_recorded_step`).
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lab.bench.stepping import take_steps_together
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.lengthening import Stage
from lab.models import build
from lab.training import lane_time, recorded_step, together
from lab.training.experiment import carry_out
from lab.training.gradients import differentiate_lanes
from lab.training.lane_time import FULL, measure_lanes
from lab.training.lanes import train_lanes
from lab.training.recorded_step import RecordedStep
from lab.training.runs import Run
from lab.training.state import start
from lab.training.stepper import Stepper
from tasks.base import Task
from tasks.flip_flop import FlipFlop
from tests.unit.training.test_lanes import TRAIN as SHORT
from tests.unit.training.test_lanes import assert_same as assert_same_runs
from tests.unit.training.test_lanes import train_in_double
from tests.unit.training.test_recorded_step import MODELS, SMALL, TRAIN, Imitation, make_small

STEPS, LANES = 5, 3


@pytest.fixture
def imitated(monkeypatch):
    monkeypatch.setattr(recorded_step, "RecordedCall", Imitation)
    make = Stepper.__init__

    def make_recording(self, *given):
        make(self, *given)
        self.may_record = True

    monkeypatch.setattr(Stepper, "__init__", make_recording)


@pytest.fixture
def recorded(monkeypatch):
    """The numbers of lanes of all steps that are recorded."""
    counts = []

    class Counted(RecordedStep):
        def __init__(self, steppers, precision):
            super().__init__(steppers, precision)
            counts.append(len(steppers))

    monkeypatch.setattr(together, "RecordedStep", Counted)
    return counts


def make_steppers(
    task: Task,
    stack: str,
    options: dict,
    device: str,
    config: TrainConfig = TRAIN,
    dtype: torch.dtype = torch.float64,
) -> list[Stepper]:
    """Return what takes the steps of trainings that differ in seed and learning rate."""
    steppers = []
    for seed in range(LANES):
        model = build(stack, vocab_size=task.vocab_size, d_model=32, seed=seed, options=options)
        train = replace(config, seed=seed, learning_rate=config.learning_rate / (1 + seed))
        steppers.append(Stepper(task, start(model.to(device, dtype), train), train))
    return steppers


def train_both(
    *given, precision: str = "fp32", share: float = 1e-9, **options
) -> tuple[list[Stepper], list[Stepper]]:
    """Train recorded lanes and each alone by calls, compare the losses, and return both."""
    lanes, alone = make_steppers(*given, **options), make_steppers(*given, **options)
    losses = torch.tensor([take_steps_together(lanes, precision) for _ in range(STEPS)])
    theirs = []
    for stepper in alone:
        stepper.may_record = False
        rows = [stepper.take_step(precision) for _ in range(STEPS)]
        theirs.append([row.loss for row in rows if row is not None])
    torch.testing.assert_close(losses, torch.tensor(theirs).mT, rtol=share, atol=0.0)
    return lanes, alone


def assert_as_alone(*given, **options) -> list[Stepper]:
    lanes, alone = train_both(*given, **options)
    for mine, own in zip(list_weights(lanes), list_weights(alone), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-7, atol=1e-9)
    return lanes


def list_weights(steppers: list[Stepper]) -> list[Tensor]:
    return [p.detach().cpu() for each in steppers for p in each.state.model.parameters()]


def make_runs(folder, **changes) -> list[Run]:
    """Three runs that end, and reach longer rows, after different steps."""
    train = replace(SHORT, max_steps=16, schedule="constant", optimizer="adamw")
    slower = {"learning_rate": 0.001, "max_steps": 9}
    trains = [
        replace(train, seed=z, **((slower if z == 1 else {}) | changes)) for z in range(LANES)
    ]
    model = ModelConfig(stack="AM SM", d_model=8)
    return [Run(folder / f"seed-{t.seed}", FlipFlop(seq_len=32), model, t) for t in trains]


def assert_runs_end_as_alone(tmp_path, monkeypatch, device, atol) -> None:
    train_in_double(monkeypatch)
    runtime = Runtime(device=device, threads=1, checkpoint_every=4, history=False)
    runs, alone = make_runs(tmp_path / "lanes"), make_runs(tmp_path / "alone")
    train_lanes(runs, runtime, shared=True)
    for run, other in zip(runs, alone, strict=True):
        carry_out(other, runtime)
        assert_same_runs(run, other, atol)
    lengths = [[row["seq_len"] for row in run.read_metrics()] for run in runs]
    assert any(len(set(at_once)) > 1 for at_once in zip(*lengths, strict=False))


@pytest.mark.gpu
@pytest.mark.parametrize(("stack", "options"), MODELS)
def test_on_a_gpu_recorded_lanes_are_the_trainings_alone(stack, options):
    lanes = assert_as_alone(SMALL, stack, options, "cuda")
    assert {each.recording for each in lanes} == {lanes[0].recording} != {None}


@pytest.mark.gpu
@pytest.mark.parametrize(("optimizer", "share"), [("adamw", 1e-3), ("muon", 0.02)])
@pytest.mark.parametrize("stack", ["AM", "SM"])
def test_on_a_gpu_recorded_lanes_in_fp32_are_near_the_trainings_alone(stack, optimizer, share):
    # Muon iterates in bf16 on a GPU, with 8 bits.
    given = {"config": replace(TRAIN, optimizer=optimizer), "dtype": torch.float32}
    lanes, _ = train_both(SMALL, stack, {}, "cuda", share=share, **given)
    assert lanes[0].recorded


@pytest.mark.gpu
@pytest.mark.parametrize(("stack", "records"), [("AM SM", True), ("AR", None)])
def test_on_a_gpu_recorded_lanes_in_bf16_are_near_the_trainings_alone(stack, records):
    given = {"precision": "bf16", "dtype": torch.float32}
    lanes, _ = train_both(SMALL, stack, {}, "cuda", share=0.02, **given)
    # Whether routed experts can be recorded is up to torch's grouped product.
    assert records is None or lanes[0].recorded


@pytest.mark.gpu
def test_on_a_gpu_lanes_that_change_stage_or_end_are_recorded_anew(tmp_path, monkeypatch, recorded):
    # Recorded steps read their rates in fp32: off by 2⁻²⁵ of .03, or 1e-9, in each.
    assert_runs_end_as_alone(tmp_path, monkeypatch, "cuda", 1e-6)
    assert {1, 2, 3} <= set(recorded)


@pytest.mark.gpu
def test_on_a_gpu_lanes_are_timed_as_recorded():
    models = [build("AM*2", vocab_size=256, d_model=64, seed=z).cuda() for z in range(8)]
    found = measure_lanes(models, [Stage(SMALL, 16, 1)], "fp32", 0.5)
    assert 0 < found.share < 1


@pytest.mark.parametrize(("stack", "options"), MODELS)
def test_recorded_lanes_are_the_trainings_alone(imitated, recorded, stack, options):
    assert_as_alone(SMALL, stack, options, "cpu")
    assert recorded == [LANES]


@pytest.mark.parametrize("name", ["flip_flop", "language"])
def test_rows_of_lanes_may_differ_in_scored_positions(imitated, recorded, name):
    assert_as_alone(make_small(name), "AM", {}, "cpu")
    assert recorded == [LANES]


def test_muon_takes_the_steps_of_all_lanes(imitated, recorded):
    assert_as_alone(SMALL, "AM", {}, "cpu", config=replace(TRAIN, optimizer="muon"))
    assert recorded == [LANES]


def test_more_scored_positions_than_were_recorded_end_the_recording(
    imitated, recorded, monkeypatch
):
    monkeypatch.setattr(recorded_step, "_count_positions", lambda batch: 3)
    lanes = assert_as_alone(SMALL, "AM", {}, "cpu")
    assert recorded == [LANES]
    assert not any(each.recorded or each.may_record for each in lanes)


def test_lanes_that_change_stage_or_end_are_recorded_anew(
    imitated, recorded, tmp_path, monkeypatch
):
    assert_runs_end_as_alone(tmp_path, monkeypatch, "cpu", 1e-10)
    assert {1, 2, 3} <= set(recorded)


def test_a_recorded_lane_that_diverges_is_not_updated(imitated, recorded, tmp_path, monkeypatch):
    train_in_double(monkeypatch)
    runtime = Runtime(device="cpu", threads=1, checkpoint_every=4, history=False)
    fixed = {"lengthen": False, "max_steps": 6}
    runs, alone = make_runs(tmp_path / "lanes", **fixed), make_runs(tmp_path / "alone", **fixed)
    runs[1] = replace(runs[1], train=replace(runs[1].train, learning_rate=1e3))
    results = train_lanes(runs, runtime, shared=True)
    assert [result["stopped"] for result in results] == ["budget", "diverged", "budget"]
    assert recorded == [3, 2]
    for number in (0, 2):
        carry_out(alone[number], runtime)
        assert_same_runs(runs[number], alone[number], 1e-10)


@pytest.mark.parametrize(("stack", "options"), MODELS)
def test_gradients_of_lanes_depend_on_no_value_that_a_graph_would_wait_for(
    monkeypatch, stack, options
):
    """On the meta device there are no values, so reading one raises."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())
    models = [
        build(stack, vocab_size=256, d_model=32, options=options).to("meta") for _ in range(2)
    ]
    batches = [SMALL.batch(size=4, device="meta") for _ in models]
    differentiate_lanes(models, batches, "fp32", per_row=16)
    assert all(p.grad is not None for model in models for p in model.parameters())


def test_lanes_that_a_gpus_memory_does_not_hold_take_turns(monkeypatch):
    def refuse(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(lane_time, "record_gradients", refuse)
    models = [build("AM", vocab_size=256, d_model=32, seed=z) for z in range(2)]
    found = measure_lanes(models, [Stage(SMALL, 2, 1)], "fp32", 0.0)
    assert found.obstacle == FULL
    assert not found.shared
