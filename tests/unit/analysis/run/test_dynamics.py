"""Planted changes of a run are told in their order, and of several runs in how many."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.base import NotApplicableError, Words
from analysis.plain import to_plain
from analysis.run import dynamics
from analysis.run.dynamics import compare_runs
from analysis.run.onsets import Onset, Onsets, find_onsets
from analysis.run.paths import Paths, date_changes
from analysis.run.trajectories import Series
from analysis.statistics.change_points import (
    Change,
)
from lab.files import RunError
from tests.planted_runs import STEPS, bound, edit, planted, subject, walks


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
    says = dynamics.describe(order).says
    assert says.startswith(
        "First mask drift (steps 4 to 8), then expert entropy (steps 32 to 64); "
    )
    assert "query → value mass" in says.split(";")[1]
    assert "change by less than a tenth" in says
    assert "Mask drift of layer 0 goes from 0 nats to" in dynamics.describe(paths).says
    json.dumps(to_plain([paths, order]), allow_nan=False)
    for result in (paths, order):
        figure = dynamics.draw(result)
        assert figure
        assert len(json.dumps(figure.to_plotly_json(), default=str)) < 100_000
        assert figure.to_dict()["layout"]["xaxis"]["type"] == "log"


def test_a_run_in_which_nothing_moves_says_so(tmp_path):
    paths, order = dynamics.measure(subject(planted(tmp_path / "run")))
    assert isinstance(order, Onsets)
    assert all(onset.change is None for onset in order.onsets[0])
    assert dynamics.describe(order).says.startswith("Nothing moves by a tenth: neither e^−loss nor")
    says = dynamics.describe(paths).says
    named = "e^−loss, accuracy, value → key mass and query → value mass"
    assert says == f"None of {named} moves by a tenth up to step 256."
    assert dynamics.draw(paths)
    assert dynamics.draw(order) is None


def follow_series(*levels: np.ndarray) -> list[Series]:
    """Series of planted levels."""
    return [
        Series(f"q{i}", "share", "share", None, None, one, 0.0, "uniform", one, one[None])
        for i, one in enumerate(levels)
    ]


def describe_series(*levels: np.ndarray) -> tuple[str, str]:
    """What is said of series, and of their order."""
    paths = date_changes(follow_series(*levels), STEPS, 4, bound())
    order = Onsets(("",), (find_onsets(paths),), 1024)
    return dynamics.describe(paths).says, dynamics.describe(order).says


def test_what_moves_at_no_one_time_is_told_from_what_does_not_move():
    ramp, still, step = np.linspace(0, 1, len(STEPS)), np.zeros(len(STEPS)), 1.0 * (STEPS > 63)
    assert describe_series(ramp, still) == (
        "None of q0 and q1 makes one clear change by step 1,024. Q0 goes from "
        "0.0 % to 100.0 % (uniform 0.0 %), but at no definite time.",
        "q0 moves, but at no definite time; q1 changes by less than a tenth.",
    )
    assert describe_series(ramp, still, step) == (
        "Up to step 1,024, q2 goes from 0.0 % to 100.0 % (uniform 0.0 %). Q0 goes "
        "from 0.0 % to 100.0 % (uniform 0.0 %), but at no definite time.",
        "Only q2 (steps 45 to 64) changes at a definite time; q0 moves, but at no definite time; "
        "q1 changes by less than a tenth.",
    )
    assert describe_series(ramp, ramp)[1] == "q0 and q1 move, but at no definite time."


def describe_loss(loss: np.ndarray, accuracy: np.ndarray) -> tuple[Words, Words]:
    """The words for a run's loss in nats and its accuracy, and for their order."""
    of_loss, of_accuracy = follow_series(np.exp(-loss), accuracy)
    named = replace(of_loss, quantity="loss", unit="nats", values=loss, null=4.2, dated="e^−loss")
    paths = date_changes([named, replace(of_accuracy, quantity="accuracy")], STEPS, 4, bound())
    return dynamics.describe(paths), dynamics.describe(Onsets(("",), (find_onsets(paths),), 1024))


def test_a_loss_that_falls_from_60_nats_to_4_is_not_said_to_stay():
    """What is dated, e^−loss, moves by a hundredth: it alone may be said to."""
    late = STEPS > 63
    told, order = describe_loss(np.where(late, 4.5, 59.8), 0.9 * late)
    assert told.gist == "Accuracy makes one clear change by step 1,024."
    assert order.says == (
        "Only accuracy (steps 45 to 64) changes; e^−loss changes by less than a tenth."
    )
    told, order = describe_loss(np.where(late, 4.5, 59.8), np.zeros(len(STEPS)))
    assert told.says == "None of e^−loss and accuracy moves by a tenth up to step 1,024."
    assert order.says == "Nothing moves by a tenth: neither e^−loss nor accuracy."


def test_what_is_dated_of_a_loss_is_named_with_every_date():
    """The loss halves early and the answers' probability rises late: the order hangs on which."""
    early, late = STEPS > 7, STEPS > 63
    loss = np.where(late, 0.1, np.where(early, 6.0, 60.0))
    told, order = describe_loss(loss, 0.9 * (STEPS > 15))
    assert order.says == "First accuracy (steps 11 to 16), then e^−loss (steps 45 to 64)."
    assert "the loss in nats is half-way at another step" in order.reading
    assert told.gist == "E^−loss and accuracy each make one clear change by step 1,024."
    ramp = np.linspace(0, 1, len(STEPS))
    told, _ = describe_loss(-np.log(0.01 + 0.9 * ramp), np.zeros(len(STEPS)))
    assert "but e^−loss moves at no definite time." in told.says


def test_no_order_is_told_of_runs_that_wander():
    """Two series a run, each called a change once in a hundred: an order once in ten thousand."""
    rng = np.random.default_rng(5)
    said = [describe_series(*walks(rng, 2, size=0.05))[1] for _ in range(200)]
    named = [words for words in said if words.startswith(("First", "Only", "The order"))]
    # 2 % of 200 is 4 ± 2.
    assert len(named) <= 10
    assert sum(words.startswith("First") for words in named) <= 1


def at(name: str, low: int, high: int, layer: int | None = None) -> Onset:
    step = math.sqrt((1 + low) * (1 + high)) - 1
    return Onset(name, layer, Change(step, low, high, low, high, 0.0, 1.0), moved=True)


def test_overlapping_brackets_leave_the_order_open():
    row = (
        at("a", 32, 64),
        at("b", 45, 128),
        at("c", 128, 181),
        Onset("d", None, None, moved=False),
    )
    says = dynamics.describe(Onsets(("",), (row,), 1000)).says
    assert says == (
        "First a and b (steps 32 to 128), then c (steps 128 to 181); d changes by less than a "
        "tenth."
    )
    says = dynamics.describe(Onsets(("",), (row[:2],), 1000)).says
    assert says == "The order is not decided between a and b (steps 32 to 128)."
    says = dynamics.describe(Onsets(("",), (row[:1],), 1000)).says
    assert says == "Only a (steps 32 to 64) changes."


def test_seeds_are_counted_by_order():
    rows = (
        (at("b", 64, 91), at("a", 32, 64), at("c", 91, 128)),
        (at("b", 64, 91), at("a", 45, 91), at("c", 128, 181)),
        (at("b", 11, 16), at("a", 16, 23), at("c", 16, 32)),
        (at("b", 64, 91), Onset("a", None, None, moved=True), Onset("c", None, None, moved=False)),
    )
    both = Onsets(("seed 0", "seed 1", "seed 2", "seed 3"), rows, 1000)
    words = dynamics.describe(both)
    assert words.says == (
        "A before b in 1 of 3 runs, after in 1; a before c in 2 of 3 runs; "
        "b before c in 3 of 3 runs. All other orders are not decided."
    )
    assert "4 runs" in words.title
    figure = dynamics.draw(both)
    assert figure
    traces = figure.to_plotly_json()["data"]
    names = [trace["name"] for trace in traces if trace["mode"] == "markers"]
    assert names == ["seed 0", "seed 1", "seed 2", "seed 3"]


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
    assert dynamics.describe(both).says.startswith("In no run is the order")
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


def list_notes(order: Onsets) -> list[str]:
    """Return what a figure says where it is pointed at."""
    fig = order.draw()
    assert fig is not None
    return [note for trace in fig.to_dict()["data"] for note in trace.get("customdata", ())]


def test_a_figure_names_the_layer_that_all_runs_agree_on():
    change = Change(9.0, 8, 16, 8, 16, 0.0, 1.0)
    mass, loss = (Onset(name, None, change, moved=True) for name in ("mass", "loss"))
    first = (replace(mass, layer=1), loss, Onset("drift", 0, None, moved=False))
    for layer, label in ((1, "mass, layer 1"), (2, "mass")):
        both = Onsets(("x", "y"), (first, (replace(mass, layer=layer), loss)), 100)
        fig = both.draw()
        assert fig is not None
        assert sorted(fig.to_dict()["layout"]["yaxis"]["ticktext"]) == ["loss", label]
        where = "steps 8 to 16"
        assert list_notes(both)[:2] == [f"x<br>mass, layer 1: {where}", f"x<br>loss: {where}"]
    assert list_notes(Onsets(("",), (first,), 100))[0] == "mass, layer 1: steps 8 to 16"
