"""Planted changes of a run are told in their order, and of several runs in how many."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.base import NotApplicableError
from analysis.plain import to_plain
from analysis.run import dynamics
from analysis.run.dynamics import (
    Onset,
    Onsets,
    Paths,
    compare_runs,
    date_changes,
    find_onsets,
)
from analysis.run.trajectories import Series
from analysis.statistics.change_points import Change
from lab.files import RunError
from tests.planted_runs import STEPS, bound, edit, planted, subject


def test_a_planted_run_is_told_in_order(tmp_path):
    steps = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    run = planted(tmp_path / "run", "AM AE", steps, options={"A.mask": "soft", "E.n_experts": 64})
    edit(run, 8, "blocks.0.mixer.mask.l", lambda table: table - 3)
    # Zero queries tie all scores: every position takes the same experts.
    edit(run, 64, "blocks.1.mlp.query.weight", torch.zeros_like)
    paths, order = dynamics.measure(subject(run))
    assert isinstance(paths, Paths)
    assert isinstance(order, Onsets)
    found = {onset.quantity: onset.change for onset in order.onsets[0]}
    assert found["mask drift"]
    assert (found["mask drift"].low, found["mask drift"].high) == (4, 8)
    assert found["expert entropy"]
    assert (found["expert entropy"].low, found["expert entropy"].high) == (32, 64)
    assert found["query → value mass"] is None
    assert {path.lead.quantity: path.lead.layer for path in paths.paths}["expert entropy"] == 1
    assert order.says == (
        "Changes in order: mask drift (steps 4 to 8), then expert entropy (steps 32 to 64)."
    )
    moves = {row[0]: (row[1], row[-1]) for row in paths.numbers().rows}
    assert moves["mask drift, layer 0"] == ("0 nats", "mask drift: steps 4 to 8")
    assert moves["query → value mass, layer 0"][1].endswith("changes by less than a tenth")
    json.dumps(to_plain([paths, order]), allow_nan=False)
    for result in (paths, order):
        figure = result.figure()
        assert figure
        assert len(json.dumps(figure.to_plotly_json(), default=str)) < 100_000


def test_a_run_in_which_nothing_moves_says_so(tmp_path):
    paths, order = dynamics.measure(subject(planted(tmp_path / "run")))
    assert order.says == "Changes in order: none at a definite time."
    assert paths.says.endswith("change by step 256, measured on 6 of the test rows: none of 4.")
    assert order.figure() is None


def describe_loss(loss: np.ndarray, accuracy: np.ndarray) -> tuple[Paths, Onsets]:
    """The words for a run's loss in nats and its accuracy, and for their order."""
    drawn = {"loss": (loss, np.exp(-loss), "e^−loss"), "accuracy": (accuracy, accuracy, "")}
    series = [
        Series(name, "", "share", None, None, values, 0.1, "uniform", level, level[None], dated)
        for name, (values, level, dated) in drawn.items()
    ]
    paths = date_changes(series, STEPS, 4, bound())
    return paths, Onsets(("",), (find_onsets(paths),), 1024)


def test_what_is_dated_of_a_loss_is_named_with_every_date():
    """The loss halves early and the answers' probability rises late: the order hangs on which."""
    early, late = STEPS > 7, STEPS > 63
    loss = np.where(late, 0.1, np.where(early, 6.0, 60.0))
    paths, order = describe_loss(loss, 0.9 * (STEPS > 15))
    assert order.says == (
        "Changes in order: accuracy (steps 11 to 16), then e^−loss (steps 45 to 64)."
    )
    assert "the loss in nats is half-way at another step" in order.reading
    assert paths.says.endswith("2 of 2 (e^−loss and accuracy).")
    ramp = np.linspace(0, 1, len(STEPS))
    paths, _ = describe_loss(-np.log(0.01 + 0.9 * ramp), np.zeros(len(STEPS)))
    assert paths.paths[0].when == "e^−loss moves, at no definite time"
    # A loss that falls from 60 nats to 4 does not stay: what is dated moves by a hundredth.
    paths, _ = describe_loss(np.where(late, 4.5, 59.8), 0.9 * late)
    assert paths.says.endswith("1 of 2 (accuracy).")
    assert paths.numbers().rows[0][-1] == "e^−loss changes by less than a tenth"


def at(name: str, low: int, high: int) -> Onset:
    step = math.sqrt((1 + low) * (1 + high)) - 1
    return Onset(name, None, Change(step, low, high, low, high, 0.0, 1.0))


def test_seeds_are_counted_by_order():
    rows = (
        (at("b", 64, 91), at("a", 32, 64), at("c", 91, 128)),
        (at("b", 64, 91), at("a", 45, 91), at("c", 128, 181)),
        (at("b", 11, 16), at("a", 16, 23), at("c", 16, 32)),
        (at("b", 64, 91), Onset("a", None, None), Onset("c", None, None)),
    )
    both = Onsets(("seed 0", "seed 1", "seed 2", "seed 3"), rows, 1000)
    assert both.says == "Pairs of changes that come in the same order in all 4 runs: 0 of 3."
    table = both.numbers()
    assert table
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("a", "b in 1 of 3, c in 2 of 3"),
        ("b", "a in 1 of 3, c in 3 of 3"),
        ("c", ""),
    ]
    figure = both.figure()
    assert figure
    names = [trace["name"] for trace in figure.to_dict()["data"]]
    assert names == [f"seed {i}" for i in range(4)]


def test_across_runs_measures_each(tmp_path):
    runs = []
    for seed in (3, 4):
        run = planted(tmp_path / str(seed), "AM", seed=seed, options={"A.mask": "soft"})
        edit(run, 16, "blocks.0.mixer.mask.l", lambda table: table - 3)
        runs.append(run)
    both = compare_runs([replace(subject(runs[0]), run=runs[0]), subject(runs[1])])
    assert both.runs == ("seed 3", "seed 4")
    assert compare_runs([subject(runs[0]), subject(runs[0])]).runs == ("3", "3")
    for row in both.onsets:
        [mask] = [onset for onset in row if onset.quantity == "mask drift"]
        assert mask.change
        assert (mask.change.low, mask.change.high) == (4, 16)
    assert "the same order in all 2 runs: 0 of" in both.says
    with pytest.raises(ValueError, match="must be at least one run"):
        compare_runs([])


def test_what_cannot_be_followed_says_why(tmp_path):
    run = planted(tmp_path / "run", steps=(1, 2))
    with pytest.raises(NotApplicableError, match="weights of 3 steps are kept, fewer than 4"):
        dynamics.measure(subject(run))
    with pytest.raises(NotApplicableError, match="no run"):
        dynamics.measure(replace(subject(run), run=None))


def test_a_damaged_file_is_named(tmp_path):
    run = planted(tmp_path / "run")
    file = run.list_kept_weights()[16]
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(RunError, match="step-00000016"):
        dynamics.measure(subject(run))
