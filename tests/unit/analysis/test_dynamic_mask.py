"""Planted masks are found for what they are; every number is the loop over queries and keys."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from analysis import dynamic_mask
from analysis.base import NotApplicableError, Subject
from analysis.dynamic_mask.heads import heads
from analysis.dynamic_mask.history import History, beyond, learn, without_masks
from analysis.dynamic_mask.masking import (
    LIGHT,
    answers_at,
    auroc,
    masked_layers,
    onset,
    readers,
    see,
)
from analysis.dynamic_mask.results import Effect, Kept, Selection, Trajectory, Values
from analysis.record import to_plain
from analysis.statistics.estimates import Estimate, westfall_young
from lab.config import ModelConfig, TrainConfig
from lab.layers.mask import SoftMask
from lab.models import LanguageModel, build
from lab.models.evaluation import find_stored_positions, score
from lab.ops.attention import MASKED
from lab.training.runs import Run
from tasks.mqar import FILLER, MQAR, VALUE

TASK = MQAR(seq_len=16, vocab_size=64)


def model(mask: str, *, n_heads: int = 1, window: int | None = None, **more) -> LanguageModel:
    options = {"A.mask": mask, "A.max_seq_len": 40, **more}
    if window is not None:
        options["A.window"] = window
    built = build("AM*2", vocab_size=64, d_model=16, n_heads=n_heads, options=options, seed=1)
    return built.eval()


def subject(built: LanguageModel, rows: int = 6, run: Run | None = None) -> Subject:
    return Subject(TASK, built, TASK.batch(split="test", size=rows), run=run)


def planted(built: LanguageModel, masked: torch.Tensor) -> LanguageModel:
    """Close a straight-through table at these positions."""
    for module in masked_layers(built).values():
        table = dict(module.named_parameters())["mask.l"]
        with torch.no_grad():
            table[:, : len(masked)] = 1.0 - masked.float()
    return built


def random_biases(seed: int, window: int | None):
    generator = torch.Generator().manual_seed(seed)
    bias = 4 * torch.randn(2, 3, 12, generator=generator)
    bias[0, 0] = 0.0
    bias[0, 1, :5] = MASKED
    bias[1, 2] = MASKED
    return bias


def brute_masked(bias, window):
    """[t s] for one head: the definition."""
    size = len(bias)
    masked = np.zeros((size, size), bool)
    for t in range(size):
        best = max(bias[: t + 1])
        for s in range(t + 1):
            outranking = sum(
                bias[o] > bias[s] or (bias[o] == bias[s] and o > s) for o in range(t + 1)
            )
            outside = window is not None and outranking >= window
            masked[t, s] = outside or math.exp(bias[s] - best) < LIGHT
    return masked


@pytest.mark.parametrize("window", [None, 1, 3, 12, 20])
def test_a_key_is_masked_from_its_onset_on(window):
    bias = random_biases(0, window)
    found = onset(bias, window)
    for b, h in np.ndindex(2, 3):
        masked = brute_masked(bias[b, h].double().tolist(), window)
        for s in range(12):
            for t in range(s, 12):
                assert masked[t, s] == (found[b, h, s] <= t)


def test_readers_are_counted_as_the_loop_counts_them():
    bias = random_biases(1, 4)
    asking = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    kept, eligible = readers(onset(bias, 4), asking)
    for b, h in np.ndindex(2, 3):
        masked = brute_masked(bias[b, h].double().tolist(), 4)
        for s in range(12):
            queries = [t for t in range(s, 12) if asking[b, t]]
            assert eligible[b, s] == len(queries)
            assert kept[b, h, s] == sum(not masked[t, s] for t in queries)


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
    built = model(mask, n_heads=n_heads, window=window, **{"A.n_kv_heads": n_kv_heads})
    torch.manual_seed(0)
    for module in masked_layers(built).values():
        for p in module.mask.parameters():  # type: ignore[union-attr]
            with torch.no_grad():
                p.copy_(3 * torch.randn_like(p))
    batch = TASK.batch(split="test", size=3)
    layer = see(built, batch)[1]
    found = heads(layer, batch, 4, 4, np.random.default_rng(0))
    stored, answer = find_stored_positions(batch), answers_at(batch)
    group = n_heads // n_kv_heads
    # The oracle's attention comes from the layer itself, bias and window replaced in place.
    _, cache = built.run_with_cache(batch.inputs, "blocks.1.mixer.hook_pattern")
    with_mask = cache["blocks.1.mixer.hook_pattern"].detach()
    layer.module.window = None
    with without_masks(built, [1]):
        module, (x,) = layer.module, _inputs(built, batch)
        free_of_1 = module.matrix(x).detach()
    layer.module.window = window
    for head in range(n_kv_heads):
        total = dict.fromkeys(("n", "kept", "right", "eligible", "stored", "hidden"), 0)
        lost = lost_answer = lost_unstored = answered = before = moved = 0.0
        bound, unbound, even = [], [], []
        shares: dict[int, list[bool]] = {role: [] for role in range(4)}
        weights: dict[int, list[float]] = {role: [] for role in range(4)}
        for b in range(3):
            bias = layer.bias[b, head].double().tolist()
            masked = brute_masked(bias, window)
            for t in range(16):
                for s in range(t + 1):
                    shares[int(batch.roles[b, s])].append(not masked[t, s])
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
        assert one.kept == pytest.approx(np.mean([k for role in shares.values() for k in role]))
        for role in range(4):
            assert one.kept_by_role[role] == pytest.approx(np.mean(shares[role]))
            assert one.weight_by_role[role] == near(float(np.mean(weights[role])))
        assert one.lost.value == near(lost / n)
        assert one.lost.chance == pytest.approx(1 - total["kept"] / total["eligible"])
        assert one.moved == near(moved / n)
        assert one.pairs is not None
        assert one.pairs.precision.value == pytest.approx(total["right"] / total["kept"])
        assert one.pairs.precision.chance == pytest.approx(total["stored"] / total["eligible"])
        assert one.pairs.recall.value == pytest.approx(total["right"] / total["stored"])
        assert one.pairs.hidden.value == pytest.approx(total["hidden"] / n)
        assert one.pairs.answer.value == near(answered / n)
        assert one.pairs.answer.chance == near(before / n)
        assert one.pairs.gained.value == near((answered - before) / n)
        assert one.pairs.key.value == near(float(np.mean(bound)))
        assert one.pairs.key.chance == near(float(np.mean(unbound)))
        assert one.pairs.key_gained.value == near(float(np.mean(bound) - np.mean(unbound)))
        assert one.pairs.key_uniform == near(float(np.mean(even)))
        if lost:
            assert one.pairs.lost_answer.value == near(lost_answer / lost)
            assert one.pairs.lost_unstored.value == near(lost_unstored / lost)


def near(expected: float):
    """Within what sums of a few hundred fp32 softmax entries may be off."""
    return pytest.approx(expected, rel=1e-4, abs=1e-6)


def _inputs(built, batch):
    """The input of the second block's mixer."""
    _, cache = built.run_with_cache(batch.inputs, "blocks.1.hook_resid_pre")
    return [built.blocks[1].norm_mixer(cache["blocks.1.hook_resid_pre"])]


def first_head(built: LanguageModel):
    batch = TASK.batch(split="test", size=6)
    return heads(see(built, batch)[0], batch, 4, 4, np.random.default_rng(0))[0]


def test_a_table_that_masks_all_but_the_pairs_takes_noise():
    keep = find_stored_positions(TASK.batch(size=1))[0]
    found = first_head(planted(model("straight-through"), ~keep))
    assert found.pairs is not None
    assert found.pairs.precision.value == 1
    assert found.pairs.recall.value == 1
    assert found.pairs.auroc.value == 1
    assert found.pairs.hidden.value == 0
    assert found.pairs.lost_unstored.value == 1
    assert found.lost.value > 0
    assert found.verdict == "noise"


def test_a_table_that_masks_the_answers_is_said_to_take_them():
    roles = TASK.batch(size=1).roles[0]
    built = planted(model("straight-through"), roles == VALUE)
    found = first_head(built)
    assert found.pairs is not None
    assert found.pairs.hidden.value == 1
    assert found.pairs.answer.value == 0
    assert found.pairs.auroc.value < 0.5
    assert found.verdict == "answers"
    [effect] = [r for r in dynamic_mask.measure(subject(built)) if isinstance(r, Effect)]
    assert "Layer 0 takes answers" in dynamic_mask.describe(effect).says


def test_a_table_that_masks_fillers_and_half_the_answers_takes_both():
    roles = TASK.batch(size=1).roles[0]
    masked = roles != VALUE
    masked[1] = True
    assert first_head(planted(model("straight-through"), masked)).verdict == "both"


@pytest.mark.parametrize(
    ("free", "change", "verdict"),
    [
        (0.5, (-0.5, -0.4), "keys"),
        (0.5, (-0.01, 0.01), "noise"),
        (0.5, (0.1, 0.2), "noise"),
        (0.05, (-0.05, -0.04), "noise"),
    ],
    ids=["taken", "unclear", "gained", "less than evenly"],
)
def test_a_mask_that_takes_keys_from_their_values_is_not_praised(free, change, verdict):
    keep = find_stored_positions(TASK.batch(size=1))[0]
    found = first_head(planted(model("straight-through"), ~keep))
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
    assert head.verdict == verdict
    # What moves the scored queries alone does not excuse it.
    idle = replace(head, moved=0.0)
    assert idle.verdict == ("keys" if verdict == "keys" else "nothing")


def test_a_mask_without_which_more_is_right_is_said_to_do_harm():
    effect = dynamic_mask.measure(subject(model("straight-through")))[2]
    assert isinstance(effect, Effect)
    assert "harm." not in dynamic_mask.describe(effect).says
    gains = np.zeros((64, 2))
    gains[:, 1] = np.random.default_rng(0).normal(0.3, 0.1, 64)
    harm = tuple(westfall_young(-gains, np.random.default_rng(0)).tolist())
    removal = (effect.removal[0], Estimate(0.3, 0.28, 0.32, 0.0))
    harmful = replace(effect, harm=harm, removal=removal)
    says = dynamic_mask.describe(harmful).says
    assert "So whatever they take, the masks of layer 1 do harm." in says
    fig = dynamic_mask.draw(harmful)
    assert fig is not None
    notes = [note["text"] for note in fig.to_dict()["layout"]["annotations"]]
    assert [note.endswith(", does harm") for note in notes] == [False, True]


def test_whiskers_go_to_the_true_ends():
    effect = dynamic_mask.measure(subject(model("straight-through")))[2]
    assert isinstance(effect, Effect)
    head = effect.heads[0]
    assert head.pairs is not None
    pairs = replace(head.pairs, answer=Estimate(0.5, 0.45, 0.7, 0.3))
    fig = dynamic_mask.draw(replace(effect, heads=(replace(head, pairs=pairs),)))
    assert fig is not None
    traces: Any = fig.data
    [whiskers] = [trace.error_x for trace in traces if trace.error_x.array is not None]
    np.testing.assert_allclose(whiskers.array, [0.2])
    np.testing.assert_allclose(whiskers.arrayminus, [0.05])


def test_kept_keys_are_drawn_where_they_are():
    roles = TASK.batch(size=1).roles[0]
    built = planted(model("straight-through"), roles == FILLER)
    of = subject(built)
    kept = dynamic_mask.measure(of)[2]
    assert isinstance(kept, Kept)
    assert kept.bands == tuple(range(0, 17, 2))
    layer = see(built, of.batch)[0]
    shares: dict[tuple[int, int], list[bool]] = {}
    for b in range(len(of.batch.inputs)):
        masked = brute_masked(layer.bias[b, 0].double().tolist(), None)
        for t, s in np.argwhere(np.tri(16)).tolist():
            shares.setdefault((int(of.batch.roles[b, s]), s // 2), []).append(not masked[t, s])
    fig = dynamic_mask.draw(kept)
    assert fig is not None
    traces: Any = fig.data
    cells = traces[0].z
    for role, band in np.ndindex(4, 8):
        found = kept.heads[0].kept_by_band[role, band]
        if (role, band) not in shares:
            assert np.isnan(found)
            continue
        assert found == pytest.approx(np.mean(shares[role, band]))
        assert cells[role, band] == pytest.approx(found)
    assert "filler at" in dynamic_mask.describe(kept).says


def test_a_mask_of_equal_biases_does_nothing():
    found = first_head(model("soft"))
    assert found.verdict == "nothing"
    assert found.lightest == 1
    assert found.kept == 1
    assert found.pairs is not None
    assert found.pairs.auroc.value == 0.5
    assert found.pairs.gained.value == pytest.approx(0, abs=1e-6)


def test_an_oracle_keeps_what_it_is_told():
    found = first_head(model("oracle"))
    assert found.pairs is not None
    assert (found.pairs.precision.value, found.pairs.recall.value) == (1, 1)
    values = dynamic_mask.measure(subject(model("oracle")))[0]
    assert isinstance(values, Values)
    assert np.isnan(values.gradients).all()
    assert "told" in dynamic_mask.describe(values).says


@pytest.mark.parametrize("mask", ["literal", "straight-through", "soft", "value"])
def test_the_gradient_is_that_of_the_mean_loss(mask):
    built, batch = model(mask), TASK.batch(split="test", size=4)
    _, found = learn(built, batch)
    hidden, head, targets = score(built, batch, "fp32")
    torch.nn.functional.cross_entropy(hidden @ head.T, targets).backward()
    for (_, module), size in zip(masked_layers(built).items(), found, strict=True):
        grads = [p.grad for p in module.mask.parameters()]  # type: ignore[union-attr]
        expected = math.sqrt(sum(float((g**2).sum()) for g in grads if g is not None))
        assert size == pytest.approx(expected, rel=1e-4, abs=1e-9)
        assert (size == 0) == (mask == "literal")


def test_a_literal_mask_is_called_dead():
    values = dynamic_mask.measure(subject(model("literal")))[0]
    assert "dead" in dynamic_mask.describe(values).says
    soft = dynamic_mask.measure(subject(model("soft")))[0]
    assert "dead" not in dynamic_mask.describe(soft).says


def test_biases_are_means_over_rows_of_a_role_at_a_position():
    built = model("value")
    for module in masked_layers(built).values():
        torch.nn.init.constant_(module.mask.A, 1.0)  # type: ignore[union-attr, arg-type]
    of = subject(built)
    values = dynamic_mask.measure(of)[0]
    assert isinstance(values, Values)
    bias = see(built, of.batch)[1].bias
    for t in range(16):
        for role in range(4):
            rows = (of.batch.roles[:, t] == role).nonzero()[:, 0]
            if not len(rows):
                assert np.isnan(values.bias[1, role, t])
                continue
            here = bias[rows, 0, t].double().numpy()
            assert values.bias[1, role, t] == pytest.approx(here.mean())
            assert values.spread[1, role, t] == pytest.approx(here.std(), abs=1e-6)
    fillers = bias[:, 0][of.batch.roles == FILLER].double().mean().item()
    assert values.bias_by_role[1, FILLER] == pytest.approx(fillers)


def trained(tmp_path, mask: str) -> Run:
    """A run whose history was written by hand: l falls by a tenth a step at position 3."""
    options = {"A.mask": mask, "A.max_seq_len": 40}
    run = Run(
        tmp_path / mask, TASK, ModelConfig(stack="AM*2", d_model=16, options=options), TrainConfig()
    )
    run.claim()
    state = run.load()
    for step in (1, 2, 4):
        for name, p in state.model.named_parameters():
            if name.endswith("mask.l") and mask != "literal":
                p.data[:, 3] -= 0.1
        state.step = step
        run.keep(state)
    return run


def test_history_follows_the_table(tmp_path):
    run = trained(tmp_path, "soft")
    results = dynamic_mask.measure(replace(subject(run.weights(4)), run=run))
    past, way = results[-1], results[-2]
    assert isinstance(past, History)
    assert isinstance(way, Trajectory)
    assert past.steps.tolist() == [0, 1, 2, 4]
    np.testing.assert_allclose(past.drifts, np.arange(4)[:, None] * [[0.1, 0.1]], atol=1e-6)
    assert (past.gradients > 0).all()
    assert way.values.shape == (4, 2, 16)
    np.testing.assert_allclose(way.values[:, 0, 3], [1, 0.9, 0.8, 0.7], rtol=1e-6)
    assert (np.delete(way.values, 3, axis=2) == 1).all()


def test_a_literal_mask_is_dead_all_along(tmp_path):
    run = trained(tmp_path, "literal")
    past = dynamic_mask.measure(replace(subject(run.weights(4)), run=run))[-1]
    assert isinstance(past, History)
    assert (past.gradients == 0).all()
    assert (past.drifts == 0).all()
    assert "dead" in dynamic_mask.describe(past).says


def test_beyond_the_length_a_table_is_as_it_began():
    built = model("soft")
    rng = np.random.default_rng(0)
    for module in masked_layers(built).values():
        assert isinstance(module.mask, SoftMask)
        with torch.no_grad():
            module.mask.l[:, :16] = 3.0
    found = beyond(subject(built), rng)
    assert (found.entries, found.untouched, found.seq_len) == (24, 1.0, 32)
    expected = torch.sigmoid(torch.tensor(1.0)) / torch.sigmoid(torch.tensor(3.0))
    assert found.weight == pytest.approx(float(expected))
    assert found.accuracy is not None
    # Past the table stand fillers and queries, of lower bias; before it the pairs and the rest.
    assert len(found.auroc) == 2
    short = build("AM", vocab_size=64, d_model=16, options={"A.mask": "soft", "A.max_seq_len": 20})
    assert "table ends at 20" in beyond(subject(short.eval()), rng).why
    few = MQAR(seq_len=16, vocab_size=30)
    small = build("AM", vocab_size=30, d_model=16, options={"A.mask": "value"}).eval()
    assert "vocab_size=30" in beyond(Subject(few, small, few.batch(split="test", size=2)), rng).why


def test_removing_a_mask_that_does_nothing_changes_nothing():
    effect = dynamic_mask.measure(subject(model("soft")))[2]
    assert isinstance(effect, Effect)
    assert [change.value for change in effect.removal] == [0.0, 0.0]


def test_a_model_without_masks_is_not_looked_at():
    with pytest.raises(NotApplicableError, match="no block has a dynamic mask"):
        dynamic_mask.measure(subject(build("AM SM", vocab_size=64, d_model=16).eval()))


@pytest.mark.parametrize("mask", ["straight-through", "value"])
def test_every_result_is_said_drawn_and_recorded(tmp_path, mask):
    run = trained(tmp_path, mask)
    results = dynamic_mask.measure(replace(subject(run.weights(4)), run=run))
    assert [type(result) for result in results] == [Values, Selection, Effect, Trajectory, History]
    for result in results:
        words = dynamic_mask.describe(result)
        assert words.says.endswith(".")
        assert "nan" not in words.says
        json.dumps(to_plain(result), allow_nan=False)
        fig = dynamic_mask.draw(result)
        assert fig is not None
        assert len(fig.to_dict()["data"]) >= 2


def test_one_row_decides_nothing():
    built = model("value")
    for module in masked_layers(built).values():
        torch.nn.init.constant_(module.mask.A, 1.0)  # type: ignore[union-attr, arg-type]
    batch = TASK.batch(split="test", size=1)
    found = heads(see(built, batch)[0], batch, 4, 4, np.random.default_rng(0))[0]
    assert found.moved > 0.001
    assert found.verdict == "undecided"
