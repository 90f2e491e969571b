"""What a sweep costs: a step of each size is timed, and the time left follows the runs."""

import pytest

from lab.cli.run_settings import read_settings
from lab.sweeps.cost import Pace, RunCost, TimeLeft, add_up, find_size, time_run
from tests.unit.sweeps.test_cells import TINY


def test_runs_that_differ_in_seed_or_rate_alone_have_one_size():
    base = read_settings("mqar", TINY)[0]
    assert find_size(read_settings("mqar", {**TINY, "seed": 1, "learning_rate": 0.1})[0]) == (
        find_size(base)
    )
    for other in ({"d_model": 16}, {"max_steps": 9}):
        assert find_size(read_settings("mqar", {**TINY, **other})[0]) != find_size(base)


def test_a_step_is_timed_and_a_known_setting_has_a_usual_time():
    unknown = time_run(read_settings("mqar", TINY)[0])
    assert unknown.usual is None
    assert 0 < unknown.step <= unknown.most
    known = {"seq_len": 64, "vocab_size": 256, "precision": "fp32"}
    usual = time_run(read_settings("mqar", known)[0]).usual
    assert usual is not None
    assert usual > 0


def test_the_time_left_is_a_bound_until_a_run_of_the_size_has_ended():
    cost = RunCost(steps=100, step=1.0, most=100.0, usual=None)
    left = TimeLeft(dict.fromkeys("abc", "size"), {"size": cost}, 2, None)
    assert left.estimate({}) == (150.0, True)
    assert left.estimate({"a": Pace(10.0, 0, 50)}) == (105.0, True)
    left.note("a", 20.0)
    assert left.estimate({}) == (20.0, False)
    assert left.estimate({"b": Pace(5.0, 0, 10)}) == (17.5, False)
    late, bound = left.estimate({"b": Pace(30.0, 40, 70)})
    assert (late, bound) == (25.0, True), "past its time, it goes on at its pace"


def test_minutes_and_workers_bound_the_cost():
    costs = [RunCost(1, 1.0, 300.0, None)] * 3
    assert add_up(costs, 2, None) == 450
    assert add_up(costs, 2, 1.0) == 90
    assert add_up(costs, 8, None) == 300
    assert add_up([], 2, None) == pytest.approx(0)
