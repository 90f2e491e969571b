"""The rules that attribute errors: masks, windows, decay and rows by loops; precedence."""

import numpy as np
import pytest
import torch

from analysis.base import Subject
from analysis.dynamic_mask.masks import find_masked_layers
from analysis.errors import attribute_errors
from analysis.errors import causes as reach
from analysis.errors.causes import (
    DECAYED,
    Questions,
    draw_other_values,
    draw_wrong_answers,
    find_neighbours,
    find_questions,
    search_rows,
)
from lab.layers.mask import SoftMask
from lab.layers.ssd import SSD
from lab.models import Block, build
from lab.models.evaluation import find_stored_positions
from tasks.mqar import MQAR

TASK = MQAR(seq_len=24, vocab_size=32, n_pairs=4)
MIXED = MQAR(seq_len=24, vocab_size=32).replace(n_pairs=(2, 6))
FULL = MQAR(seq_len=24, vocab_size=32)


def test_random_answers_are_wrong_and_as_frequent_as_targets():
    none = np.full(4000, -1)
    some = Questions(none, none, np.full(4000, 7), none, none, none)
    drawn = draw_wrong_answers(some, np.array([7, 8, 8, 8, 9]), 2, np.random.default_rng(0))
    assert set(np.unique(drawn)) == {8, 9}
    # 8,000 draws: a standard deviation of 0.005.
    assert (drawn == 8).mean() == pytest.approx(0.75, abs=0.025)
    assert (draw_wrong_answers(some, np.array([7]), 2, np.random.default_rng(0)) == -1).all()


@pytest.mark.parametrize("bias", [0.0, -3.0], ids=["as the others", "least of all"])
def test_a_lifted_window_keeps_every_stored_key_and_what_it_kept(bias):
    options = {"A.mask": "soft", "A.window": 5, "A.max_seq_len": 24}
    model = build("AM*2", vocab_size=32, d_model=32, options=options).eval()
    batch = TASK.batch(split="test", size=4)
    stored = find_stored_positions(batch)[:, None, None]
    for layer in find_masked_layers(model).values():
        assert isinstance(layer.mask, SoftMask)
        with torch.no_grad():
            layer.mask.l[:, :8] = bias
    kept: list[torch.Tensor] = []
    names = [f"blocks.{i}.mixer.hook_pattern" for i in range(2)]
    with torch.no_grad(), model.hooks([(names, lambda p, _: kept.append(p > 0))]):
        model(batch.inputs)
        reach.answer_unmasked(model, batch)
    assert [layer.window for layer in find_masked_layers(model).values()] == [5, 5]
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    for before, after in zip(kept[:2], kept[2:], strict=True):
        assert not before[(stored & causal).expand_as(before)].all()
        assert after[(stored & causal).expand_as(after)].all()
        assert after[before].all()


@pytest.mark.parametrize("groups", ["interleaved", "tiled"])
def test_decay_is_judged_by_the_entries_of_the_matrix(monkeypatch, groups):
    monkeypatch.setattr(reach, "READS", 0.0)
    options = {"S.n_groups": 2, "S.groups": groups, "S.d_state": 8, "S.dt_init": "paper"}
    model = build("SM", vocab_size=32, d_model=32, n_heads=4, options=options).double().eval()
    batch = TASK.batch(split="test", size=12)
    everyone = find_questions(batch)
    rng = np.random.default_rng(0)
    placebo, rivals = (draw_other_values(batch, everyone, rng) for _ in range(2))
    reader, found = reach.detect_decayed(model, batch, everyone, placebo, everyone, rivals[None])
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert isinstance(block.mixer, SSD)
    assert block.norm_mixer is not None
    _, cache = model.run_with_cache(batch.inputs)
    with torch.no_grad():
        M = block.mixer.matrix(block.norm_mixer(model.embed(batch.inputs))).abs()
    log_decay = cache["blocks.0.mixer.hook_log_decay"]
    contrast, expected = [], []
    for h in range(4):
        on_value, on_other, flips = [], [], []
        for i in range(len(everyone)):
            b, t = everyone.rows[i], everyone.positions[i]
            value, rival = everyone.values[i], rivals[i]
            on_value.append(M[b, h, t, value].item())
            on_other.append(M[b, h, t, placebo[i]].item())
            decay = {s: log_decay[b, s + 1 : t + 1, h].sum().exp().item() for s in (value, rival)}
            mine, theirs = M[b, h, t, value].item(), M[b, h, t, rival].item()
            flips.append(mine < theirs and mine / decay[value] >= theirs / decay[rival])
        contrast.append(np.mean(on_value) / np.mean(on_other))
        expected.append(flips)
    assert reader is not None
    assert reader.head == int(np.argmax(contrast))
    assert reader.contrast == pytest.approx(max(contrast))
    assert found[0].tolist() == expected[reader.head]
    assert found.any()


def test_without_decay_nothing_is_blamed_on_it(monkeypatch):
    monkeypatch.setattr(reach, "READS", 0.0)
    model = build("SM", vocab_size=32, d_model=32, options={"S.position": "none"})
    ledger, _ = attribute_errors(Subject(TASK, model.eval(), TASK.batch(split="test", size=40)))
    assert ledger.reader is not None
    [decayed] = [cause for cause in ledger.causes if cause.name == DECAYED]
    assert decayed.share == 0


@pytest.mark.parametrize("task", [TASK, MIXED, FULL], ids=["empty slots", "mixed", "full"])
def test_what_the_row_says_is_a_loop_over_it(task, monkeypatch):
    monkeypatch.setattr("analysis.errors.causes.BLOCK_ENTRIES", 100)
    batch = task.batch(split="test", size=60)
    found = find_questions(batch)
    inputs = batch.inputs.numpy()
    answers = draw_wrong_answers(found, inputs.ravel(), 1, np.random.default_rng(0))[0]
    # Decoys are rare, and what followed them rarer still among random answers.
    latest = [
        row[max(s for s in range(t) if row[s] == row[t]) + 1]
        for row, t in zip(inputs[found.rows].tolist(), found.positions.tolist(), strict=True)
    ]
    answers = np.where(latest == found.targets, answers, latest)
    decoys, pairs, seen = search_rows(batch, found, answers)
    rng = np.random.default_rng(0)
    others = draw_other_values(batch, found, rng)
    scored = [(b, t) for b in range(60) for t in range(24) if batch.targets[b, t] != -100]
    assert list(zip(found.rows.tolist(), found.positions.tolist(), strict=True)) == scored
    for i, (b, t) in enumerate(scored):
        row, given = inputs[b].tolist(), int(answers[i])
        assert given != found.targets[i]
        query, value = (batch.links[name][b].tolist() for name in ("query_pos", "value_pos"))
        mine = query.index(t)
        assert found.pairs[i] == mine
        assert found.values[i] == value[mine]
        assert found.keys[i] == value[mine] - 1
        places = [s for s in range(t) if row[s] == row[t] and s != value[mine] - 1]
        assert decoys[i] == any(row[s + 1] == given for s in places)
        assert seen[i] == max([s for s in range(t + 1) if row[s] == given], default=-1)
        stored = {row[at]: j for j, at in enumerate(value) if at >= 0 and j != mine}
        assert pairs[i] == stored.get(given, -1)
        assert others[i] in [at for j, at in enumerate(value) if at >= 0 and j != mine]
    assert decoys.any()
    assert (pairs >= 0).any()
    beside, chance = find_neighbours(batch, found, pairs)
    near, legal = [], []
    for i in np.flatnonzero(pairs >= 0):
        count = int((batch.links["value_pos"][found.rows[i]] >= 0).sum())
        near.append(abs(pairs[i] - found.pairs[i]) == 1)
        next_to = [j for j in range(count) if abs(j - found.pairs[i]) == 1]
        legal.append(len(next_to) / (count - 1))
    assert beside.tolist() == near
    assert chance == pytest.approx(np.mean(legal))
