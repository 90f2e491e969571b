"""Quantities over a run's weights are those of loops over entries."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.mixing import collect_mixers
from analysis.run import trajectories
from analysis.run.trajectories import choose_steps, choose_stretches, follow, take_few_rows
from lab.training.run import Run
from tasks.base import Batch
from tests.planted_runs import STEPS, edit, planted, subject


def series(run: Run, quantity: str, layer: int | None = None):
    one = subject(run)
    steps = np.array(run.list_steps())
    [found] = [
        s
        for s in follow(one, take_few_rows(one), steps)
        if (s.quantity, s.layer) == (quantity, layer)
    ]
    return found


def loop_mass(run: Run, step: int, layer: int, targets: str, sources: str) -> list[float]:
    """Masses head by head, an entry at a time."""
    one = subject(run)
    batch, model = take_few_rows(one), run.load_model(step)
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
    [
        ("value → key mass", ("value_pos", "key_pos")),
        ("query → value mass", ("query_pos", "value_pos")),
    ],
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
    assert "query → value mass" not in {s.quantity for s in followed}
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
    accuracy = series(run, "accuracy")
    assert accuracy.values[0] == pytest.approx(np.mean(right))
    assert accuracy.null == run.task.chance


@pytest.mark.parametrize(
    ("stack", "options", "quantity", "point"),
    [
        ("AE", {"E.n_experts": 16, "E.k": 2}, "expert entropy", "mlp.hook_expert_indices"),
        ("IM", {"I.n_values": 4}, "value entropy", "mixer.hook_value_indices"),
    ],
)
def test_entropies_are_those_of_the_counts(stack, options, quantity, point, tmp_path):
    run = planted(tmp_path / "run", stack, steps=(1,), options=options)
    one, seen = subject(run), []
    with one.model.hooks([(f"blocks.0.{point}", lambda x, _: seen.extend(x.flatten().tolist()))]):
        one.model(one.batch.inputs)
    shares = [seen.count(e) / len(seen) for e in set(seen)]
    entropy = -sum(p * math.log(p) for p in shares)
    found = series(run, quantity, 0)
    assert found.values[0] == pytest.approx(math.exp(entropy))
    assert found.levels[0] == pytest.approx(entropy)


@pytest.mark.parametrize(
    ("kind", "change", "drift"),
    [
        # From log σ(1) to log σ(−1); a closed mask counts as ten nats, however low it is.
        ("soft", lambda table: table - 2, 1.0),
        ("straight-through", torch.zeros_like, 10.0),
    ],
)
def test_mask_drift_is_the_root_mean_square_of_what_was_added(kind, change, drift, tmp_path):
    run = planted(tmp_path / "run", "AM", options={"A.mask": kind})
    edit(run, 16, "blocks.0.mixer.mask.l", change)
    found = series(run, "mask drift", 0)
    np.testing.assert_allclose(found.values, [0, 0, 0, drift, drift, drift], atol=1e-4)


def test_the_steps_of_a_long_history_are_thinned_but_not_around_the_jump(tmp_path, monkeypatch):
    run = planted(tmp_path / "run", steps=())
    jump = list(range(500, 540, 4))
    kept = sorted({0, *STEPS.tolist(), *jump, *range(541, 700, 8), 1024})
    rows = [{"step": s, "accuracy": float(np.clip((s - 500) / 40, 0, 1))} for s in range(1, 1025)]
    monkeypatch.setattr(Run, "list_steps", lambda run: kept)
    monkeypatch.setattr(Run, "read_metrics", lambda run: rows)
    chosen = choose_steps(run)
    assert len(chosen) == trajectories.MOST_STEPS < len(kept)
    assert {0, 1024} <= set(chosen.tolist()) <= set(kept)
    assert sum(500 <= step < 540 for step in chosen) >= 8
    assert sum(541 <= step < 700 for step in chosen) <= 3


def test_a_long_row_is_read_in_stretches_all_over_it(tmp_path):
    run = planted(tmp_path / "run", steps=())
    mixer = collect_mixers(run.build(), subject(run).batch)[0]
    assert choose_stretches(mixer, 512) == [slice(0, 512)]
    parts = choose_stretches(mixer, 2048)
    assert [part.start for part in parts] == [192, 704, 1216, 1728]
    assert all(part.stop - part.start == 128 for part in parts)


def test_resampled_rows_are_the_series_of_those_rows(tmp_path):
    run = planted(tmp_path / "run", steps=(1,))
    one = subject(run)
    draws = trajectories.draw_rows(6, np.random.default_rng(one.seed))
    assert (draws[0] == 1).all()
    assert (draws.sum(1) == 6).all()
    found = series(run, "value → key mass", 0)
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
