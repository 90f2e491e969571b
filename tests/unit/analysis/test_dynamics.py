"""Planted changes are found where they were planted, and noise is none; masses are the loops'."""

import functools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.base import NotApplicableError, Subject
from analysis.mixing import collect_mixers
from analysis.record import to_plain
from analysis.run import dynamics, trajectories
from analysis.run.paths import Onset, Onsets, Paths, across, onsets_of, paths_of
from analysis.run.trajectories import Series, chosen_steps, few_rows, follow
from analysis.statistics.change_points import (
    Change,
    estimate_noise_bound,
    find_change_point,
    moves,
    weigh_steps,
)
from lab.config import ModelConfig, TrainConfig
from lab.files import RunError
from lab.training import history
from lab.training.runs import Run
from tasks.base import Batch, Task
from tasks.mqar import MQAR

STEPS = np.array([0, *sorted({round(2 ** (k / 2)) for k in range(21)})])
"""0, then the powers of √2 up to 1,024."""
PLACE = np.log2(1.0 + STEPS)


def bound(steps=STEPS) -> float:
    return _bound(tuple(steps.tolist()))


@functools.cache
def _bound(steps: tuple[int, ...]) -> float:
    return estimate_noise_bound(np.array(steps), np.random.default_rng(0))


def change(values, steps=STEPS, resampled=None) -> Change | None:
    return find_change_point(steps, np.asarray(values, dtype=np.float64), bound(steps), resampled)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("at", [64, 181, 512])
def test_a_planted_step_is_found_between_its_neighbours(at, sign):
    found = change(np.where(at > STEPS, 0.1, 0.1 + 0.8 * sign))
    assert found
    before = STEPS[np.flatnonzero(at == STEPS)[0] - 1]
    assert (found.low, found.high) == (found.begins, found.ends) == (before, at)
    assert found.before == pytest.approx(0.1)
    assert found.after == pytest.approx(0.1 + 0.8 * sign)
    assert found.size == pytest.approx(0.8)
    assert math.log2(1 + found.step) == pytest.approx(np.log2([1 + before, 1.0 + at]).mean())


def test_the_split_is_the_least_squared_distance_by_trying_all():
    values = np.random.default_rng(1).normal(size=len(STEPS)) + 5 * (STEPS > 50) + 0.3 * PLACE
    weights = weigh_steps(STEPS)
    best = {}
    for i in range(len(STEPS) - 1):
        best[i] = 0.0
        for side in (range(i + 1), range(i + 1, len(STEPS))):
            total = sum(weights[j] for j in side)
            level = sum(weights[j] * values[j] for j in side) / total
            best[i] += sum(weights[j] * (values[j] - level) ** 2 for j in side)
    at = min(best, key=best.__getitem__)
    found = change(values)
    assert found
    assert (found.low, found.high) == (STEPS[at], STEPS[at + 1])


def test_the_spans_are_half_way_to_the_neighbours():
    np.testing.assert_allclose(weigh_steps(np.array([0, 1, 3, 15])), [0.5, 1.0, 1.5, 1.0])


@pytest.mark.parametrize("middle", [4.0, 6.0, 8.0])
def test_a_ramp_changes_in_its_middle(middle):
    # From 0 to 1 within one unit of log2 to either side; the kept steps are half a unit apart.
    found = change(np.clip((PLACE - middle + 1) / 2, 0, 1))
    assert found
    assert math.log2(1 + found.step) == pytest.approx(middle, abs=0.5)
    assert found.begins < found.low
    assert found.ends
    assert found.ends > found.high


def test_more_steps_around_a_jump_do_not_move_it():
    def ramp(steps):
        return np.clip(np.log2(1.0 + steps) - 8, 0, 1)

    denser = np.union1d(STEPS, np.arange(260, 300))
    thin, dense = change(ramp(STEPS)), change(ramp(denser), denser)
    assert thin
    assert dense
    assert abs(math.log2((1 + thin.step) / (1 + dense.step))) < 0.5


@pytest.mark.parametrize("n", [4, 6, 10, 21])
def test_noise_and_walks_have_no_change(n):
    steps = STEPS[-n:]
    rng, level = np.random.default_rng(2), bound(steps)
    for null in (rng.normal(size=(1000, n)), walks(rng, 1000, steps)):
        alarms = sum(find_change_point(steps, 0.5 + one, level) is not None for one in null)
        # 1 % of 1,000 is 10 ± 3, and the bound itself is a quantile of 2,000; as much again.
        assert alarms <= 25


def walks(rng, count: int, steps=STEPS, size: float = 1.0) -> np.ndarray:
    """Random walks along log₂(1 + step)."""
    strides = rng.normal(size=(count, len(steps))) * np.sqrt(
        np.diff(np.log2(1.0 + steps), prepend=0)
    )
    return size * strides.cumsum(-1)


@pytest.mark.parametrize("n", [6, 11, 16, 21])
@pytest.mark.parametrize("shape", [0.05, 1.0])
def test_walks_of_equal_strides_a_kept_step_have_no_change(n, shape):
    """Not quite the null of the bound: kept steps lie unevenly on its axis."""
    rng, level = np.random.default_rng(3), bound(STEPS[-n:])
    strides = shape * rng.normal(size=(500, n)).cumsum(-1)
    alarms = sum(find_change_point(STEPS[-n:], one, level) is not None for one in strides)
    assert alarms <= 15


@pytest.mark.parametrize("n", [6, 11, 21])
def test_an_even_ramp_moves_at_no_one_time(n):
    steps = STEPS[-n:]
    ramp = np.linspace(0, 1, n)
    assert change(ramp, steps) is None
    assert moves(ramp)
    assert not moves(0.09 * ramp)


@pytest.mark.parametrize("values", [np.zeros(21), np.where(STEPS < 64, 0.5, 0.59)])
def test_a_constant_or_a_tiny_step_is_no_change(values):
    assert change(values) is None


@pytest.mark.parametrize("height", [1.0, 100.0])
def test_one_outlier_is_no_change(height):
    assert change(np.where(STEPS == 64, height, 0.0)) is None


def test_a_jump_at_the_last_step_is_one():
    found = change(np.where(STEPS == 1024, 1.0, 0.0))
    assert found
    assert (found.low, found.high) == (724, 1024)


def test_a_bracket_holds_the_splits_of_other_rows():
    values = np.where(STEPS < 64, 0.0, 1.0)
    other = np.where(STEPS < 256, 0.0, 1.0)
    found = change(values, resampled=np.stack([values] * 60 + [other] * 40))
    assert found
    assert (found.low, found.high) == (45, 256)
    rare = change(values, resampled=np.stack([values] * 99 + [other]))
    assert rare
    assert (rare.low, rare.high) == (45, 64)


def test_fewer_than_four_steps_are_refused():
    with pytest.raises(ValueError, match=r"steps=3: must be ≥ 4"):
        change([0.0, 0.0, 1.0], STEPS[:3])


def planted(path, stack="AM AM", steps=(1, 4, 16, 64, 256), *, seed=0, options=None) -> Run:
    """A run folder without training: the same initial weights at every step."""
    model = ModelConfig(stack=stack, d_model=16, n_heads=2, options=options or {})
    run = Run(path, MQAR(seq_len=16, vocab_size=32), model, TrainConfig(seed=seed))
    run.claim()
    for step in steps:
        history.save(run.path, step, run.build())
    return run


def edit(run: Run, first: int, name: str, how) -> None:
    """Change a weight at a step and all that come after."""
    for step in run.steps():
        if step >= first:
            model = run.weights(step)
            with torch.no_grad():
                weight = model.get_parameter(name)
                weight.copy_(how(weight))
            history.save(run.path, step, model)


def subject(run: Run, rows: int = 6) -> Subject:
    return Subject.of(run, step=0, rows=rows)


def series(run: Run, quantity: str, layer: int | None = None):
    one = subject(run)
    steps = np.array(run.steps())
    [found] = [
        s for s in follow(one, few_rows(one), steps) if (s.quantity, s.layer) == (quantity, layer)
    ]
    return found


def loop_mass(run: Run, step: int, layer: int, targets: str, sources: str) -> list[float]:
    """Masses head by head, an entry at a time."""
    one = subject(run)
    batch, model = few_rows(one), run.weights(step)
    mixer = collect_mixers(model, batch)[layer]
    shares: list[list[float]] = [[], []]
    for row in range(len(batch.inputs)):
        matrix = mixer.matrix(row).detach()
        for i, j in zip(batch.links[targets][row], batch.links[sources][row], strict=True):
            for head in range(2):
                total = sum(abs(float(matrix[head, i, s])) for s in range(16))
                shares[head].append(abs(float(matrix[head, i, j])) / total)
    return [sum(share) / len(share) for share in shares]


@pytest.mark.parametrize("stack", ["AM AM", "SM SM"])
@pytest.mark.parametrize(
    ("quantity", "ends"),
    [("previous-token score", ("value_pos", "key_pos")), ("KV mass", ("query_pos", "value_pos"))],
)
def test_masses_are_the_loops_over_entries(tmp_path, stack, quantity, ends):
    run = planted(tmp_path / "run", stack, steps=(1,))
    for layer in (0, 1):
        found = series(run, quantity, layer)
        masses = loop_mass(run, 1, layer, *ends)
        assert found.head == int(np.argmax(masses))
        # fp32 against Python's doubles.
        assert found.values[-1] == pytest.approx(max(masses), rel=1e-5)


def test_without_pairs_every_position_counts_and_there_is_no_kv_mass(tmp_path):
    run = planted(tmp_path / "run", steps=(1,))
    one = subject(run)
    batch = Batch(one.batch.inputs, one.batch.targets, one.batch.roles, {})
    followed = follow(replace(one, batch=batch), batch, np.array([0, 1]))
    assert "KV mass" not in {s.quantity for s in followed}
    [found] = [s for s in followed if (s.quantity, s.layer) == ("previous-token score", 0)]
    matrix = torch.stack(
        [collect_mixers(one.model, batch)[0].matrix(row) for row in range(6)]
    ).detach()
    masses = [matrix[:, head, range(1, 16), range(15)].mean().item() for head in range(2)]
    assert found.values[0] == pytest.approx(max(masses), rel=1e-5)
    assert found.null == pytest.approx(np.mean([1 / (t + 1) for t in range(1, 16)]))


def test_loss_and_accuracy_are_the_mean_over_scored_positions(tmp_path):
    run = planted(tmp_path / "run", steps=(1,))
    one = subject(run)
    logits, targets = one.model(one.batch.inputs).detach(), one.batch.targets
    losses, right = [], []
    for row in range(6):
        for t in range(16):
            if targets[row, t] != -100:
                losses.append(-logits[row, t].log_softmax(-1)[targets[row, t]].item())
                right.append(logits[row, t].argmax() == targets[row, t])
    found = series(run, "loss")
    assert found.values[0] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.levels[0] == pytest.approx(math.exp(-np.mean(losses)), rel=1e-4)
    assert found.null == pytest.approx(math.log(32))
    assert series(run, "accuracy").values[0] == pytest.approx(np.mean(right))


def test_expert_entropy_is_that_of_the_counts(tmp_path):
    run = planted(tmp_path / "run", "AE", steps=(1,), options={"E.n_experts": 16, "E.k": 2})
    one = subject(run)
    seen: list[int] = []
    name = "blocks.0.mlp.hook_expert_indices"
    with one.model.hooks([(name, lambda x, _: seen.extend(x.flatten().tolist()))]):
        one.model(one.batch.inputs)
    shares = [seen.count(e) / len(seen) for e in set(seen)]
    entropy = -sum(p * math.log(p) for p in shares)
    found = series(run, "expert entropy", 0)
    assert found.values[0] == pytest.approx(math.exp(entropy))
    assert found.levels[0] == pytest.approx(entropy)


def test_value_entropy_is_that_of_the_counts(tmp_path):
    run = planted(tmp_path / "run", "IM", steps=(1,), options={"I.n_values": 4})
    one = subject(run)
    seen: list[int] = []
    name = "blocks.0.mixer.hook_value_indices"
    with one.model.hooks([(name, lambda x, _: seen.extend(x.flatten().tolist()))]):
        one.model(one.batch.inputs)
    shares = [seen.count(v) / len(seen) for v in set(seen)]
    entropy = -sum(p * math.log(p) for p in shares)
    assert series(run, "value entropy", 0).levels[0] == pytest.approx(entropy)


def test_mask_drift_is_the_root_mean_square_of_what_was_added(tmp_path):
    run = planted(tmp_path / "run", "AM", options={"A.mask": "soft"})
    edit(run, 16, "blocks.0.mixer.mask.l", lambda table: table - 2)
    sigmoid = [1 / (1 + math.exp(-x)) for x in (1.0, -1.0)]
    drift = abs(math.log(sigmoid[1]) - math.log(sigmoid[0]))
    found = series(run, "mask drift", 0)
    np.testing.assert_allclose(found.values, [0, 0, 0, drift, drift, drift], atol=1e-5)


def test_a_closed_mask_counts_as_ten_nats_however_low(tmp_path):
    run = planted(tmp_path / "run", "AM", options={"A.mask": "straight-through"})
    edit(run, 16, "blocks.0.mixer.mask.l", torch.zeros_like)
    np.testing.assert_allclose(
        series(run, "mask drift", 0).values, [0, 0, 0, 10, 10, 10], atol=1e-4
    )


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
    assert found["KV mass"] is None
    assert {path.lead.quantity: path.lead.layer for path in paths.paths}["expert entropy"] == 1
    says = dynamics.describe(order).says
    assert says.startswith(
        "First mask drift (steps 4 to 8), then expert entropy (steps 32 to 64); "
    )
    assert "KV mass" in says.split(";")[1]
    assert "do not change" in says
    assert "mask drift of layer 0 from 0 nats to" in dynamics.describe(paths).says
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
    assert dynamics.describe(order).says.startswith("Nothing moves by a tenth: neither loss nor")
    says = dynamics.describe(paths).says
    assert says == "None of 4 quantities moves by a tenth up to step 256."
    assert dynamics.draw(paths)
    assert dynamics.draw(order) is None


def followed(*levels: np.ndarray) -> list[Series]:
    """Series of planted levels."""
    return [
        Series(f"q{i}", "share", "share", None, None, one, 0.0, "uniform", one, one[None])
        for i, one in enumerate(levels)
    ]


def told(*levels: np.ndarray) -> tuple[str, str]:
    """What is said of series, and of their order."""
    paths = paths_of(followed(*levels), STEPS, 4, bound())
    order = Onsets(("",), (onsets_of(paths),), 1024)
    return dynamics.describe(paths).says, dynamics.describe(order).says


def test_what_moves_at_no_one_time_is_told_from_what_does_not_move():
    ramp, still, step = np.linspace(0, 1, len(STEPS)), np.zeros(len(STEPS)), 1.0 * (STEPS > 63)
    assert told(ramp, still) == (
        "None of 2 quantities changes at a time that can be told up to step 1,024; q0 from 0.0 % "
        "to 100.0 % (uniform 0.0 %), but when cannot be said.",
        "q0 moves, but when cannot be said; q1 does not change.",
    )
    assert told(ramp, still, step) == (
        "1 of 3 quantities changes by step 1,024: q2 from 0.0 % to 100.0 % (uniform 0.0 %); q0 "
        "from 0.0 % to 100.0 % (uniform 0.0 %), but when cannot be said.",
        "Only q2 (steps 45 to 64) changes at one time; q0 moves, but when cannot be said; q1 does "
        "not change.",
    )
    assert told(ramp, ramp)[1] == "q0 and q1 move, but when cannot be said."


def test_no_order_is_told_of_runs_that_wander():
    """Two series a run, each called a change once in a hundred: an order once in ten thousand."""
    rng = np.random.default_rng(5)
    said = [told(*walks(rng, 2, size=0.05))[1] for _ in range(200)]
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
    assert says == "First a and b (steps 32 to 128), then c (steps 128 to 181); d does not change."
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
        "What comes first: a before b in 1 of 3 runs, after in 1; a before c in 2 of 3 runs; "
        "b before c in 3 of 3 runs. Elsewhere the order is not decided."
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
    both = across([replace(subject(runs[0]), run=runs[0]), subject(runs[1])])
    assert both.runs == ("seed 3", "seed 4")
    assert across([subject(runs[0]), subject(runs[0])]).runs == ("3", "3")
    for row in both.onsets:
        [mask] = [onset for onset in row if onset.quantity == "mask drift"]
        assert mask.change
        assert (mask.change.low, mask.change.high) == (4, 16)
    assert dynamics.describe(both).says.startswith("In no run is the order")
    with pytest.raises(ValueError, match="must be at least one run"):
        across([])


def test_what_cannot_be_followed_says_why(tmp_path):
    run = planted(tmp_path / "run", steps=(1, 2))
    with pytest.raises(NotApplicableError, match="weights of 3 steps are kept, fewer than 4"):
        dynamics.measure(subject(run))
    with pytest.raises(NotApplicableError, match="no run"):
        dynamics.measure(replace(subject(run), run=None))


def test_a_damaged_file_is_named(tmp_path):
    run = planted(tmp_path / "run")
    file = history.saved(run.path)[16]
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(RunError, match="step-00000016"):
        dynamics.measure(subject(run))


def test_the_steps_of_a_long_history_are_thinned_but_not_around_the_jump(tmp_path, monkeypatch):
    run = planted(tmp_path / "run", steps=())
    jump = list(range(500, 540, 4))
    kept = sorted({0, *STEPS.tolist(), *jump, *range(541, 700, 8), 1024})
    rows = [{"step": s, "accuracy": float(np.clip((s - 500) / 40, 0, 1))} for s in range(1, 1025)]
    monkeypatch.setattr(Run, "steps", lambda run: kept)
    monkeypatch.setattr(Run, "metrics", lambda run: rows)
    chosen = chosen_steps(run)
    assert len(chosen) == trajectories.MOST_STEPS < len(kept)
    assert {0, 1024} <= set(chosen.tolist()) <= set(kept)
    assert sum(500 <= step < 540 for step in chosen) >= 8
    assert sum(541 <= step < 700 for step in chosen) <= 3


def test_a_long_row_is_read_in_stretches_all_over_it(tmp_path):
    run = planted(tmp_path / "run", steps=())
    mixer = collect_mixers(run.build(), subject(run).batch)[0]
    assert trajectories.stretches(mixer, 512) == [slice(0, 512)]
    parts = trajectories.stretches(mixer, 2048)
    assert [part.start for part in parts] == [192, 704, 1216, 1728]
    assert all(part.stop - part.start == 128 for part in parts)


def test_resampled_rows_are_the_series_of_those_rows(tmp_path):
    run = planted(tmp_path / "run", steps=(1,))
    one = subject(run)
    draws = trajectories._draws(6, np.random.default_rng(one.seed))
    assert (draws[0] == 1).all()
    assert (draws.sum(1) == 6).all()
    found = series(run, "previous-token score", 0)
    for resample in (0, 7):
        counts = draws[1 + resample].astype(int)
        rows = np.repeat(np.arange(6), counts).tolist()
        batch = Batch(
            one.batch.inputs[rows],
            one.batch.targets[rows],
            one.batch.roles[rows],
            {name: link[rows] for name, link in one.batch.links.items()},
        )
        again = follow(replace(one, batch=batch), batch, np.array([0, 1]))
        [same] = [s for s in again if (s.quantity, s.layer) == (found.quantity, 0)]
        if same.head == found.head:
            assert found.resampled[resample, 1] == pytest.approx(same.levels[1], rel=1e-5)


def test_the_task_is_what_names_chance(tmp_path):
    run = planted(tmp_path / "run", steps=(1,))
    assert isinstance(run.task, Task)
    assert series(run, "accuracy").null == run.task.chance
