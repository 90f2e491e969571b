"""Runs trained together: each does what it would do alone, is kept alone, and can be resumed."""

import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from lab.config import ModelConfig, Runtime, TrainConfig
from lab.training import lane_time, lanes
from lab.training.experiment import carry_out
from lab.training.lane_time import LaneTime
from lab.training.lanes import check_shapes, train_lanes
from lab.training.runs import Run
from tasks.flip_flop import FlipFlop

TOGETHER, APART = LaneTime(1.0, 2.0), LaneTime(2.0, 1.0)
RUNTIME = Runtime(device="cpu", threads=1, checkpoint_every=4, history=False)
TRAIN = TrainConfig(
    max_steps=11,
    learning_rate=0.03,
    batch_size=4,
    eval_every=3,
    test_rows=32,
    warmup_steps=2,
    lengthen=True,
    # A little above chance, so that runs reach longer rows after different steps.
    lengthen_at=0.6,
    stage_steps=20,
    schedule="error",
    precision="fp32",
)


def make_runs(folder, stack="AM SM", **changes):
    """Three runs that differ in seed, learning rate, rows and number of steps."""
    task, model = FlipFlop(seq_len=32), ModelConfig(stack=stack, d_model=8)
    trains = (
        replace(TRAIN, seed=0, **changes),
        replace(TRAIN, seed=1, learning_rate=0.01, **({"max_steps": 7} | changes)),
        replace(TRAIN, seed=2, optimizer="adamw", **changes),
    )
    return [Run(folder / f"seed-{t.seed}", task, model, t) for t in trains]


def choose(monkeypatch, times):
    monkeypatch.setattr(lanes, "measure_lanes", lambda *args: times)


def train_in_double(monkeypatch):
    build = Run.build
    monkeypatch.setattr(Run, "build", lambda self: build(self).double())


def read_kept(run):
    """Return what a run folder says of training, without times, and the last weights."""
    rows = [
        {name: value for name, value in row.items() if "seconds" not in name}
        for row in run.read_metrics()
    ]
    return rows, run.load_state().model.state_dict()


def assert_same(run, other, atol):
    (rows, weights), (other_rows, other_weights) = read_kept(run), read_kept(other)
    assert [row.keys() for row in rows] == [row.keys() for row in other_rows]
    for row, known in zip(rows, other_rows, strict=True):
        for name, value in row.items():
            assert value == pytest.approx(known[name], abs=atol), (row["step"], name)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=0, atol=atol, msg=name)


def test_runs_together_end_as_alone(tmp_path, monkeypatch):
    choose(monkeypatch, TOGETHER)
    train_in_double(monkeypatch)
    runs, alone = make_runs(tmp_path / "lanes"), make_runs(tmp_path / "alone")
    results = train_lanes(runs, RUNTIME)
    for run, other, result in zip(runs, alone, results, strict=True):
        known = carry_out(other, RUNTIME)
        assert_same(run, other, 1e-10)
        for name in ("stopped", "steps", "rows", "accuracy", "baselines", "set_by_hand"):
            assert result[name] == pytest.approx(known[name], abs=1e-10), name
        assert run.read_result() == json.loads(json.dumps(result))
    lengths = [[row["seq_len"] for row in run.read_metrics()] for run in runs]
    assert any(len(set(at_once)) > 1 for at_once in zip(*lengths, strict=False))


def test_runs_in_turns_end_with_the_same_bits_as_alone(tmp_path, monkeypatch):
    choose(monkeypatch, APART)
    runs, alone = make_runs(tmp_path / "lanes"), make_runs(tmp_path / "alone")
    train_lanes(runs, RUNTIME)
    for run, other in zip(runs, alone, strict=True):
        carry_out(other, RUNTIME)
        assert_same(run, other, 0.0)


def test_a_stopped_lane_is_resumed_alone_and_with_the_others(tmp_path, monkeypatch):
    choose(monkeypatch, TOGETHER)
    train_in_double(monkeypatch)
    whole, parts = make_runs(tmp_path / "whole"), make_runs(tmp_path / "parts")
    train_lanes(whole, RUNTIME)
    stop_after(4, parts)
    carry_out(parts[1], RUNTIME)
    train_lanes(parts, RUNTIME)
    for run, other in zip(parts, whole, strict=True):
        assert_same(run, other, 1e-10)


def stop_after(step, runs):
    """Train until a step of the last run, and lose everything since the last checkpoint."""

    class KilledError(Exception):
        pass

    def kill(run, row):
        if run is runs[-1] and row.step == step + 1:
            raise KilledError

    with pytest.raises(KilledError):
        train_lanes(runs, RUNTIME, on_row=kill)
    assert [max(run.list_checkpoints()) for run in runs] == [step] * len(runs)


def test_a_signal_stops_all_with_checkpoints(tmp_path, monkeypatch):
    choose(monkeypatch, TOGETHER)
    runs = make_runs(tmp_path)

    def interrupt(run, row):
        if run is runs[0] and row.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    results = train_lanes(runs, RUNTIME, on_row=interrupt)
    for run, result in zip(runs, results, strict=True):
        assert (result["stopped"], result["signal"], result["steps"]) == (
            "interrupted",
            "SIGTERM",
            3,
        )
        assert list(run.list_checkpoints()) == [3]


def test_a_run_that_diverges_ends_alone(tmp_path, monkeypatch):
    choose(monkeypatch, TOGETHER)
    runs = make_runs(tmp_path, lengthen=False, schedule="constant")
    runs[1] = replace(runs[1], train=replace(runs[1].train, learning_rate=1e30, optimizer="adamw"))
    ended = []
    results = train_lanes(
        runs, RUNTIME, on_end=lambda run, *rest: ended.append((run.path.name, rest[1]))
    )
    assert [result["stopped"] for result in results] == ["budget", "diverged", "budget"]
    assert ended[0][0] == "seed-1"
    assert "try a lower --learning-rate" in str(ended[0][1])
    assert [error for _, error in ended[1:]] == [None, None]
    assert [result["steps"] for result in results][::2] == [11, 11]


def test_finished_runs_return_their_results(tmp_path, monkeypatch):
    choose(monkeypatch, APART)
    runs = make_runs(tmp_path, lengthen=False, max_steps=2)[::2]
    first = train_lanes(runs, RUNTIME)
    planned = []
    again = train_lanes(runs, RUNTIME, on_plan=lambda plan, times: planned.append(plan))
    assert again == [json.loads(json.dumps(result)) for result in first]
    assert not planned


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"d_model": 16}, "d_model=16: must be 8"), ({"stack": "AM"}, "stack=AM: must be AM SM")],
)
def test_runs_of_different_shapes_are_refused(tmp_path, changes, says):
    first, second, _ = make_runs(tmp_path)
    other = replace(second, model=replace(second.model, **changes))
    with pytest.raises(ValueError, match=says):
        check_shapes([first, other])
    check_shapes([first, replace(second, model=replace(second.model, embedding_std=0.5))])


def test_what_is_said_of_the_choice():
    assert str(LaneTime(1.0, 2.0)) == "together: a step of all takes 0.50 times as long together"
    assert not LaneTime(0.95, 1.0).shared
    assert str(LaneTime()) == "one after another: there is one"
    assert math.isnan(LaneTime(obstacle="so").together)
    assert str(LaneTime(obstacle="so")) == "one after another: so"
    assert str(LaneTime(chosen=True)) == "together, as before"


def test_the_time_of_lanes_is_measured_once(tmp_path, monkeypatch):
    kept, run = {}, make_runs(tmp_path)[0]
    monkeypatch.setattr(lane_time, "read", lambda kind: kept)
    monkeypatch.setattr(lane_time, "remember", lambda kind, key, value: kept.update({key: value}))
    first = lane_time.time_lanes(run, 2, torch.device("cpu"), 1)
    assert 0 < first.share < 10
    monkeypatch.setattr(lane_time, "measure_lanes", None)
    assert lane_time.time_lanes(run, 2, torch.device("cpu"), 1) == first
    kept.update({key: {"together": -1.0, "apart": 1.0} for key in kept})
    with pytest.raises(TypeError):  # nothing plausible is kept, so it is measured
        lane_time.time_lanes(run, 2, torch.device("cpu"), 1)


def test_lanes_that_memory_does_not_hold_together_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "count_fitting_lanes", lambda run, most: most - 1)
    runs, said = make_runs(tmp_path, lengthen=False, max_steps=1), []
    train_lanes(runs, RUNTIME, on_plan=lambda plan, times: said.append(str(times)))
    assert said == ["one after another: memory holds 2 of them together"]
