"""Restoring and editing equal loops over rows, and placebos do nothing; planted parts are named."""

import numpy as np
import pytest
import torch
from torch import nn

from analysis.base import Subject
from analysis.mechanism import effects, measure
from analysis.mechanism.couples import (
    Couples,
    draw_couples,
    estimate_share,
    measure_baseline,
)
from analysis.mechanism.effects import (
    ARMS,
    SITES,
    Components,
    edit,
    find_carriers,
    measure_components,
    restore,
)
from analysis.scoring import scored
from lab.layers.attention import Attention
from lab.layers.mixer import MatrixMixer, adapt
from lab.models import Block, build
from tests import mechanisms
from tests.unit.analysis.mechanism.planted import (
    MAKERS,
    ROWS,
    build_random,
    compute_margin,
    make_generator,
    measure_planted,
)


@pytest.mark.parametrize("name", ["induction", "induction by SSD"])
def test_what_each_intervention_does_to_induction(name):
    found, edited = measure_planted(name)
    assert found.restored is not None
    assert edited is not None
    # The planted attention leaks e⁻²⁵ of its mass, the planted SSD e⁻⁶ of what it gathers.
    inner = dict(zip(SITES, found.restored.share[:, 1], strict=True))
    assert inner.pop("value") == pytest.approx(1, abs=0.01)
    assert list(inner.values()) == pytest.approx([0] * 4, abs=0.01)
    # Without its edge nothing tells the two values apart; gathered in layer 0, read in layer 1.
    write, read = ARMS.index("value → key"), ARMS.index("query → value")
    assert edited.left[write] == pytest.approx([0.5, 1], abs=0.05)
    assert edited.left[read] == pytest.approx([1, 0.5], abs=0.05)
    assert edited.left[2] == pytest.approx([1, 0], abs=0.02)
    assert edited.placebo == pytest.approx(np.ones((3, 2)), abs=0.02)
    assert edited.followed.tolist() == [0, 1]
    assert edited.placebo_followed.tolist() == [0, 0]


def walk(model, inputs, place=None, change=None):
    """Return logits of a row, and the residual stream and what is added to it, by place.

    A place is a depth, or a block and its mixer or transform; what passes one may be changed.
    """
    x, seen = model.embed(inputs), {}

    def note(where, of):
        seen[where] = of if change is None or where != place else change(of)
        return seen[where]

    for i, block in enumerate(model.blocks):
        x = note(i, x)
        if block.mixer is not None:
            x = x + note((i, "mixer"), block.mixer(block.norm_mixer(x)))
        if block.mlp is not None:
            x = x + note((i, "transform"), block.mlp(block.norm_mlp(x)))
    return model.head(model.norm_final(note(len(model.blocks), x)))[0], seen


def restore_at(clean: torch.Tensor, positions: list[int]):
    def change(x):
        x = x.clone()
        for position in positions:
            x[0, position] = clean[0, position]
        return x

    return change


@torch.no_grad()
@pytest.mark.parametrize("stack", ["AM*3", "SM*2", "SM NM"])
def test_restoring_is_the_loop_over_rows(stack):
    model, pairs = build_random(stack)
    known = measure_baseline(model, pairs)
    restored = restore(model, known, make_generator())
    parts = measure_components(model, known, make_generator())
    assert restored.queries == 2 * int(pairs.valid.sum()) >= 4
    places = [*restored.depths.tolist(), *zip(parts.layers.tolist(), parts.components, strict=True)]
    assert set(places) == set(walk(model, pairs.clean.inputs[:1])[1])
    shares = [*restored.share[:4].T, *parts.share[:, :3]]
    for place, found in zip(places, shares, strict=True):
        above, below = np.zeros(len(found)), 0.0
        for row in pairs.valid[:, 0].nonzero()[:, 0].tolist():
            sites = [z[row].flatten().tolist() for z in (pairs.key, pairs.value, pairs.query)]
            taken = {i for site in sites for i in site}
            sites.append([i for i in range(16) if i not in taken])
            edited = pairs.corrupt.inputs[row : row + 1]
            (whole, clean), (none, _) = (
                walk(model, inputs) for inputs in (pairs.clean.inputs[row : row + 1], edited)
            )
            after = [
                walk(model, edited, place, restore_at(clean[place], site))[0]
                for site in sites[: len(found)]
            ]
            for j in range(2):
                left = compute_margin(none, pairs, row, j)
                above += [compute_margin(logits, pairs, row, j) - left for logits in after]
                below += compute_margin(whole, pairs, row, j) - left
        assert found.tolist() == pytest.approx((above / below).tolist(), abs=1e-8)


class Edit(nn.Module):
    """A mixer by its matrix, edited for one row and couple."""

    def __init__(self, inner: nn.Module, arm: int, pairs: Couples, row: int):
        super().__init__()
        assert isinstance(inner, MatrixMixer)
        self.inner, self.arm = inner, arm
        self.query, self.key, self.value = (
            z[row, 0].tolist() for z in (pairs.query, pairs.key, pairs.value)
        )

    def forward(self, x):
        inner = self.inner
        assert isinstance(inner, MatrixMixer)
        matrix, values = inner.matrix(x).clone(), inner.values(x).clone()
        for j in range(2):
            i, s = [(self.query[j], self.value[j]), (self.value[j], self.key[j]), (0, 0)][self.arm]
            if self.arm < 2:
                for head in range(matrix.shape[1]):
                    matrix[0, head, i, s] = 0
                    if isinstance(inner, Attention):
                        matrix[0, head, i] /= matrix[0, head, i].sum()
        if self.arm == 2:
            values[:, :, self.value] = values[:, :, self.value[::-1]]
        return inner.project(x, matrix @ values)


@torch.no_grad()
@pytest.mark.parametrize("stack", ["AM*2", "SM*2"])
def test_editing_is_the_loop_over_rows(stack):
    model, pairs = build_random(stack)
    known = measure_baseline(model, pairs)
    found = edit(model, known, make_generator())
    assert found is not None
    assert found.layers.tolist() == [0, 1]
    for layer in range(2):
        for arm in range(3):
            above = below = followed = asked = 0.0
            for row in pairs.valid[:, 0].nonzero()[:, 0].tolist():
                block = model.blocks[layer]
                assert isinstance(block, Block)
                inner = block.mixer
                assert inner is not None
                block.mixer = adapt(Edit(inner, arm, pairs, row))
                logits = model(pairs.clean.inputs[row : row + 1])[0]
                block.mixer = inner
                whole = model(pairs.clean.inputs[row : row + 1])[0]
                none = model(pairs.corrupt.inputs[row : row + 1])[0]
                for j in range(2):
                    left = compute_margin(none, pairs, row, j)
                    above += compute_margin(logits, pairs, row, j) - left
                    below += compute_margin(whole, pairs, row, j) - left
                    answer = logits[pairs.query[row, 0, j]].argmax()
                    followed += answer.item() == pairs.right[row, 0, 1 - j].item()
                    asked += 1
            assert found.left[arm, layer] == pytest.approx(above / below, abs=1e-8)
            if arm == 2:
                assert found.followed[layer] == pytest.approx(followed / asked)


def test_where_couples_take_turns_one_pass_finds_the_same(monkeypatch):
    batch = mechanisms.LARGE.batch(split="test", size=8)
    model = mechanisms.induction()
    found = draw_couples(mechanisms.LARGE, batch, make_generator())
    assert found is not None
    assert found.query.shape[1] == 6
    before, passes = measure_baseline(model, found), []
    monkeypatch.setattr(effects, "scored", lambda *given: passes.append(1) or scored(*given))
    every = edit(model, before, make_generator())
    assert len(passes) == 2 * 6
    monkeypatch.setattr(effects, "MATRIX_ENTRIES", 1)
    some = edit(model, before, make_generator())
    assert len(passes) == 2 * 6 + 2
    assert every is not None
    assert some is not None
    assert (every.rows, some.rows) == (8, 4)
    # Each of six couples takes one arm in one pass; what leaks among 24 pairs is small.
    assert some.left == pytest.approx(every.left, abs=0.05)
    assert some.placebo == pytest.approx(every.placebo, abs=0.02)
    assert some.followed == pytest.approx(every.followed)


def test_a_ratio_over_what_may_be_nothing_has_no_interval():
    sums = np.stack([np.ones(8), [1, 1, 1, 1, 1, 1, 1, -5.0]], 1)
    value, ends = estimate_share(sums, make_generator())
    assert value == pytest.approx(4)
    assert np.isnan(ends).all()
    value, ends = estimate_share(np.ones((8, 2)), make_generator())
    assert (value, ends) == (1, (1, 1))


def test_depths_of_a_deep_model_are_spread(monkeypatch):
    monkeypatch.setattr(effects, "DEPTHS", 3)
    model = build("NN*8 AN", vocab_size=mechanisms.VOCAB, d_model=16).eval()
    found = draw_couples(mechanisms.TASK, ROWS[:2], make_generator())
    assert found is not None
    depths = restore(model, measure_baseline(model, found), make_generator()).depths
    assert depths.tolist() in ([0, 1, 4, 8, 9], [0, 1, 5, 8, 9])


@pytest.mark.parametrize("name", ["induction", "positional", "undecided, untrained"])
def test_planted_components_are_named_and_no_others(name):
    results = measure(Subject(mechanisms.TASK, MAKERS[name](), ROWS))
    found = [result for result in results if isinstance(result, Components)]
    if name == "induction":
        assert sorted(find_carriers(found[0])) == [(0, 1), (1, 2)]
        assert "at a time: 2 of 6;" in found[0].says
        assert "layer 0's mixer at the values, 1.00 (" in found[0].says
        assert "placebo 0.00" in found[0].says
    for one in found if name != "induction" else []:
        assert find_carriers(one) == []
        assert "at a time: 0 of" in one.says


def test_a_component_is_named_by_chance_in_few_of_a_hundred_cases():
    """Shares that are a third, the least that is not named, with intervals from 12 rows."""
    rng, named = np.random.default_rng(0), 0
    for _ in range(100):
        rows = np.stack([rng.normal(1 / 3, 0.2, 12), np.ones(12)], 1)
        value, ends = estimate_share(rows, rng)
        share, interval = np.full((1, 4), value), np.tile(ends, (1, 4, 1)).astype(float)
        share[0, -1], interval[0, -1] = 0, (-0.01, 0.01)
        one = Components(np.zeros(1, int), ("mixer",), share, interval, 12)
        named += bool(find_carriers(one))
    # 2.5 % by the interval, which 12 rows make a point or two short; two standard errors are 4.
    assert named <= 8
