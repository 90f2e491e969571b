"""Onsets, readers, AUROC and every number of a head equal loops; planted masks are named."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.dynamic_mask.masks import (
    auroc,
    disable_masks,
    find_asking,
    find_masked_layers,
    find_onsets,
    locate,
    measure_heads,
    record_masked_layers,
)
from analysis.links import find_pairs
from lab.intervals import Estimate
from lab.models.evaluation import find_stored_positions
from lab.ops.attention import MASKED
from tasks import TASKS
from tasks.mqar import VALUE
from tests.unit.analysis.dynamic_mask.models import (
    TASK,
    build_model,
    close_positions,
    find_masked_by_loop,
    measure_first_head,
)


def random_biases(seed: int, window: int | None):
    generator = torch.Generator().manual_seed(seed)
    bias = 4 * torch.randn(2, 3, 12, generator=generator)
    bias[0, 0] = 0.0
    bias[0, 1, :5] = MASKED
    bias[1, 2] = MASKED
    return bias


@pytest.mark.parametrize("window", [None, 1, 3, 12, 20])
def test_a_key_is_masked_from_its_onset_on(window):
    bias = random_biases(0, window)
    found = find_onsets(bias, window)
    for b, h in np.ndindex(2, 3):
        masked = find_masked_by_loop(bias[b, h].double().tolist(), window)
        for s in range(12):
            for t in range(s, 12):
                assert masked[t, s] == (found[b, h, s] <= t)


def test_auroc_is_the_share_of_pairs_won():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(0, 5, (3, 9)).astype(np.float64))
    positive = torch.from_numpy(rng.integers(0, 3, (3, 9)))
    negative = torch.from_numpy(rng.integers(0, 3, (3, 9)))
    found = auroc(values, positive, negative)
    for b in range(3):
        won = 0.0
        for i, j in np.ndindex(9, 9):
            tie = 0.5 * float(values[b, i] == values[b, j])
            won += float(positive[b, i] * negative[b, j]) * (
                float(values[b, i] > values[b, j]) + tie
            )
        expected = won / float(positive[b].sum() * negative[b].sum())
        assert float(found[b]) == pytest.approx(expected)
    assert auroc(torch.zeros(4), torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 1])) == 0.5


@pytest.mark.parametrize(
    ("mask", "window", "n_heads", "n_kv_heads"),
    [("soft", None, 2, 1), ("straight-through", None, 2, 2), ("value", 5, 1, 1)],
)
def test_what_a_mask_does_is_the_loop_over_queries_and_keys(mask, window, n_heads, n_kv_heads):
    built = build_model(mask, n_heads=n_heads, window=window, **{"A.n_kv_heads": n_kv_heads})
    torch.manual_seed(0)
    for module in find_masked_layers(built).values():
        for p in module.mask.parameters():  # type: ignore[union-attr]
            with torch.no_grad():
                p.copy_(3 * torch.randn_like(p))
    batch = TASK.batch(split="test", size=3)
    layer = record_masked_layers(built, batch)[1]
    found = measure_heads(layer, batch, 4, np.random.default_rng(0))
    query, _, value = find_pairs(batch)
    stored, answer = find_stored_positions(batch), locate(batch, query, value)
    group = n_heads // n_kv_heads
    # The expected attention comes from the layer itself, bias and window replaced in place.
    _, cache = built.run_with_cache(batch.inputs, "blocks.1.mixer.hook_pattern")
    with_mask = cache["blocks.1.mixer.hook_pattern"].detach()
    layer.module.window = None
    with disable_masks(built, [1]):
        module, (x,) = layer.module, capture_inputs(built, batch)
        free_of_1 = module.matrix(x).detach()
    layer.module.window = window
    for head in range(n_kv_heads):
        total = dict.fromkeys(("n", "kept", "right", "eligible", "stored", "hidden"), 0)
        lost = lost_answer = lost_unstored = answered = before = moved = 0.0
        bound, unbound, even = [], [], []
        shares: dict[int, list[bool]] = {role: [] for role in range(4)}
        weights: dict[int, list[float]] = {role: [] for role in range(4)}
        bands: dict[tuple[int, int], list[bool]] = {}
        for b in range(3):
            bias = layer.bias[b, head].double().tolist()
            masked = find_masked_by_loop(bias, window)
            for t in range(16):
                for s in range(t + 1):
                    shares[int(batch.roles[b, s])].append(not masked[t, s])
                    bands.setdefault((int(batch.roles[b, s]), s // 2), []).append(not masked[t, s])
                    weights[int(batch.roles[b, s])].append(math.exp(bias[s] - max(bias[: t + 1])))
                if t in batch.links["value_pos"][b].tolist():
                    at = batch.links["key_pos"][b, batch.links["value_pos"][b].tolist().index(t)]
                    group_heads = range(head * group, (head + 1) * group)
                    bound.append(np.mean([float(with_mask[b, h, t, at]) for h in group_heads]))
                    unbound.append(np.mean([float(free_of_1[b, h, t, at]) for h in group_heads]))
                    even.append(1 / (t + 1))
                if batch.targets[b, t] < 0:
                    continue
                total["n"] += 1
                place = int(answer[b, t])
                total["hidden"] += masked[t, place]
                for h in range(head * group, (head + 1) * group):
                    answered += float(with_mask[b, h, t, place]) / group
                    before += float(free_of_1[b, h, t, place]) / group
                    if masked[t, place]:
                        lost_answer += float(free_of_1[b, h, t, place]) / group
                for s in range(t + 1):
                    total["eligible"] += 1
                    total["stored"] += bool(stored[b, s])
                    total["kept"] += not masked[t, s]
                    total["right"] += bool(stored[b, s]) and not masked[t, s]
                    for h in range(head * group, (head + 1) * group):
                        mass = float(free_of_1[b, h, t, s]) / group
                        moved += abs(float(with_mask[b, h, t, s]) / group - mass) / 2
                        lost += mass * masked[t, s]
                        lost_unstored += mass * masked[t, s] * (not stored[b, s])
        one, n = found[head], total["n"]
        for place, share in np.ndenumerate(one.kept_by_band):
            assert share == pytest.approx(np.mean(bands.get(place, [np.nan])), nan_ok=True)
        assert one.kept == pytest.approx(np.mean([k for role in shares.values() for k in role]))
        for role in range(4):
            assert one.kept_by_role[role] == pytest.approx(np.mean(shares[role]))
            assert one.weight_by_role[role] == allow_rounding(float(np.mean(weights[role])))
        assert one.lost.value == allow_rounding(lost / n)
        assert one.lost.chance == pytest.approx(1 - total["kept"] / total["eligible"])
        assert one.moved == allow_rounding(moved / n)
        assert one.pairs is not None
        assert one.pairs.precision.value == pytest.approx(total["right"] / total["kept"])
        assert one.pairs.precision.chance == pytest.approx(total["stored"] / total["eligible"])
        assert one.pairs.recall.value == pytest.approx(total["right"] / total["stored"])
        assert one.pairs.hidden.value == pytest.approx(total["hidden"] / n)
        assert one.pairs.answer.value == allow_rounding(answered / n)
        assert one.pairs.answer.chance == allow_rounding(before / n)
        assert one.pairs.gained.value == allow_rounding((answered - before) / n)
        assert one.pairs.key.value == allow_rounding(float(np.mean(bound)))
        assert one.pairs.key.chance == allow_rounding(float(np.mean(unbound)))
        assert one.pairs.key_gained.value == allow_rounding(
            float(np.mean(bound) - np.mean(unbound))
        )
        assert one.pairs.key_uniform == allow_rounding(float(np.mean(even)))
        if lost:
            assert one.pairs.lost_answer.value == allow_rounding(lost_answer / lost)
            assert one.pairs.lost_unstored.value == allow_rounding(lost_unstored / lost)


def allow_rounding(expected: float):
    """Allow for the rounding of sums of a few hundred fp32 softmax entries."""
    return pytest.approx(expected, rel=1e-4, abs=1e-6)


def capture_inputs(built, batch):
    """Return the input of the second block's mixer."""
    _, cache = built.run_with_cache(batch.inputs, "blocks.1.hook_resid_pre")
    return [built.blocks[1].norm_mixer(cache["blocks.1.hook_resid_pre"])]


def test_a_table_that_masks_all_but_the_pairs_removes_noise():
    keep = find_stored_positions(TASK.batch(size=1))[0]
    found = measure_first_head(close_positions(build_model("straight-through"), ~keep))
    assert found.pairs is not None
    assert found.pairs.precision.value == 1
    assert found.pairs.recall.value == 1
    assert found.pairs.auroc.value == 1
    assert found.pairs.hidden.value == 0
    assert found.pairs.lost_unstored.value == 1
    assert found.lost.value > 0
    assert found.removed == "noise"


def test_a_table_that_masks_the_answers_is_said_to_remove_them():
    roles = TASK.batch(size=1).roles[0]
    built = close_positions(build_model("straight-through"), roles == VALUE)
    found = measure_first_head(built)
    assert found.pairs is not None
    assert found.pairs.hidden.value == 1
    assert found.pairs.answer.value == 0
    assert found.pairs.auroc.value < 0.5
    assert found.removed == "answers"


def test_a_table_that_masks_fillers_and_half_the_answers_removes_both():
    roles = TASK.batch(size=1).roles[0]
    masked = roles != VALUE
    masked[1] = True
    built = close_positions(build_model("straight-through"), masked)
    assert measure_first_head(built).removed == "both"


@pytest.mark.parametrize(
    ("free", "change", "removed"),
    [
        (0.5, (-0.5, -0.4), "keys"),
        (0.5, (-0.01, 0.01), "noise"),
        (0.5, (0.1, 0.2), "noise"),
        (0.05, (-0.05, -0.04), "noise"),
    ],
    ids=["taken", "unclear", "gained", "less than evenly"],
)
def test_a_mask_that_removes_keys_from_their_values_is_not_praised(free, change, removed):
    keep = find_stored_positions(TASK.batch(size=1))[0]
    found = measure_first_head(close_positions(build_model("straight-through"), ~keep))
    assert found.pairs is not None
    low, high = change
    middle = (low + high) / 2
    pairs = replace(
        found.pairs,
        key=Estimate(free + middle, 0.0, 1.0, free),
        key_gained=Estimate(middle, low, high, 0.0),
        key_uniform=0.1,
    )
    head = replace(found, pairs=pairs)
    assert head.removed == removed
    # Values lose their keys even if the attention of the scored queries does not move.
    idle = replace(head, moved=0.0)
    assert idle.removed == ("keys" if removed == "keys" else "nothing")


def test_a_mask_of_equal_biases_does_nothing():
    found = measure_first_head(build_model("soft"))
    assert found.removed == "nothing"
    assert found.lightest == 1
    assert found.kept == 1
    assert found.pairs is not None
    assert found.pairs.auroc.value == 0.5
    assert found.pairs.gained.value == pytest.approx(0, abs=1e-6)


def test_one_row_decides_nothing():
    built = build_model("value")
    for module in find_masked_layers(built).values():
        torch.nn.init.constant_(module.mask.A, 1.0)  # type: ignore[union-attr, arg-type]
    found = measure_first_head(built, rows=1)
    assert found.moved > 0.001
    assert found.removed == "undecided"


def test_a_query_whose_answer_is_not_stored_asks_for_nothing():
    batch = TASKS["copy"]().batch(split="test", size=4)
    query, _, value = find_pairs(batch)
    asking = find_asking(batch)
    assert asking.sum() < (batch.targets >= 0).sum()
    assert (locate(batch, query, value)[asking] >= 0).all()
