"""Cells that are computed together: which these are, how they end, and what fails alone."""

import dataclasses
import os

import pytest

from lab.cli.run_settings import read_settings
from lab.sweeps import lanes
from lab.sweeps.folder import CellFolder
from lab.sweeps.lanes import choose_lanes
from lab.sweeps.runner import run_cells
from lab.sweeps.table import tabulate_cells
from lab.sweeps.workers import MOST_DEATHS
from lab.training.lane_time import LaneTime
from tests.unit.sweeps.test_cells import TRAIN, cell, fake, study

pytestmark = pytest.mark.usefixtures("forked_workers")

FASTER, SLOWER = LaneTime(0.5, 1.0), LaneTime(1.0, 1.0)


def plan(cells, workers, monkeypatch, times=FASTER, todo=None):
    monkeypatch.setattr(lanes, "time_lanes", lambda run, count, device, threads: times)
    described = {each.name: read_settings(each.task, each.options) for each in cells}
    return choose_lanes(cells, described, todo or list(described), workers)


def rename(each, **factors):
    return dataclasses.replace(each, factors={**each.factors, **factors})


def test_cells_that_differ_in_seed_or_rate_go_together_and_others_do_not(monkeypatch):
    cells = [
        rename(cell(seed, d_model=width, learning_rate=rate), width=width, rate=rate)
        for seed in range(2)
        for width in (8, 16)
        for rate in (1e-3, 3e-3)
    ]
    found = plan(cells, 1, monkeypatch)
    assert [[c.options["d_model"] for c in group] for group in found.groups] == [[8] * 4, [16] * 4]
    assert "8 runs compute together, up to 4 in a process: a step of them takes 0.50" in (
        found.describe()
    )
    alone = plan(cells, 1, monkeypatch, SLOWER)
    assert {len(group) for group in alone.groups} == {1}
    assert [group[0] for group in alone.groups] == cells
    assert "Each run computes alone: together, a step of several takes 1.00" in alone.describe()


@pytest.mark.parametrize(
    ("count", "workers", "sizes"), [(8, 2, [4, 4]), (3, 2, [2, 1]), (9, 1, [5, 4]), (2, 2, [1, 1])]
)
def test_no_worker_waits_for_a_group_that_could_be_shared(count, workers, sizes, monkeypatch):
    found = plan([cell(seed) for seed in range(count)], workers, monkeypatch)
    assert [len(group) for group in found.groups] == sizes


def test_what_is_left_of_a_sweep_has_the_same_groups(monkeypatch):
    cells = [cell(seed) for seed in range(6)]
    whole = plan(cells, 2, monkeypatch)
    part = plan(cells, 2, monkeypatch, todo=[each.name for each in cells[2:]])
    assert part.groups == whole.groups


def test_memory_bounds_how_many_go_together(monkeypatch):
    monkeypatch.setattr(lanes, "measure_free_memory", lambda: 2)
    found = plan([cell(seed) for seed in range(4)], 1, monkeypatch)
    assert len(found.groups) == 4
    assert found.describe() == "Each run computes alone: memory does not hold two."


def test_cells_together_end_as_alone(tmp_path):
    pair = study(cell(0), cell(1, learning_rate=1e-3))
    run_cells(pair, tmp_path / "together", TRAIN, groups=[pair.cells])
    run_cells(pair, tmp_path / "alone", TRAIN)
    (one, other) = (tabulate_cells(pair, tmp_path / name) for name in ("together", "alone"))
    same = ("status", "steps", "rows", "accuracy", "validation", "settings", "parameters", "error")
    assert one.select(same).equals(other.select(same))
    folder = CellFolder(tmp_path / "together" / pair.cells[1].name)
    run = folder.open_run()
    assert run is not None
    assert run.load_state().shared
    assert [row["step"] for row in run.read_metrics()] == [*range(1, 9)]


def test_when_a_process_dies_of_one_cell_the_others_are_trained_alone(tmp_path):
    die = 'if "seed=1" in folder.name: os.kill(os.getpid(), signal.SIGKILL)'
    three = study(cell(0), cell(1), cell(2))
    ended = {}
    run_cells(
        three,
        tmp_path,
        fake(die),
        groups=[three.cells],
        on_end=lambda cell, folder, error: ended.setdefault(cell.factors["seed"], error),
    )
    assert (ended[0], ended[2]) == (None, None)
    assert "killed by SIGKILL" in ended[1]


def test_cells_whose_process_others_kill_stay_together(tmp_path):
    pair = study(cell(0), cell(1))
    first, second = (tmp_path / each.name for each in pair.cells)
    does = (
        '(folder / "together").write_text(str(len(paths))); '
        f'"seed=0" in folder.name and len(deaths.read_text()) < {MOST_DEATHS} '
        "and os.kill(os.getpid(), signal.SIGKILL)"
    )
    run_cells(pair, tmp_path, fake(does), groups=[pair.cells])
    assert len((first / "deaths").read_text()) == MOST_DEATHS
    assert (first / "together").read_text() == "2"
    assert CellFolder(second).read_error() is None


def test_a_cell_that_cannot_be_built_stops_no_lane(tmp_path):
    pair = study(cell(0), cell(1, options=["A.no_such=1"]))
    run_cells(pair, tmp_path, TRAIN, groups=[pair.cells])
    found = tabulate_cells(pair, tmp_path)
    assert found["status"].to_list() == ["budget", "failed"]
    assert found["error"][1].startswith("unknown option A.no_such")
    assert os.path.getsize(tmp_path / pair.cells[0].name / "log.txt")
