"""Restored components equal a loop over rows; planted ones are named, and no others."""

import numpy as np
import pytest
import torch

from analysis.base import Subject
from analysis.mechanism import describe, draw, measure
from analysis.mechanism.couples import estimate_share
from analysis.mechanism.effects import (
    Components,
    find_carriers,
    measure_baseline,
    measure_components,
)
from lab.models import Block
from tests import mechanisms
from tests.unit.analysis.mechanism.planted import (
    MAKERS,
    ROWS,
    build_random,
    compute_margin,
    make_generator,
)


@torch.no_grad()
@pytest.mark.parametrize("stack", ["AM*2", "SM NM"])
def test_components_are_the_loop_over_rows(stack):
    model, pairs = build_random(stack)
    found = measure_components(model, measure_baseline(model, pairs), make_generator())
    kinds = ["mixer", "transform"]
    named = [*zip(found.layers.tolist(), found.components, strict=True)]
    every = [(layer, kind) for layer in (0, 1) for kind in kinds]
    assert named == [one for one in every if stack != "SM NM" or one != (1, "mixer")]
    for n, (layer, kind) in enumerate(named):
        above, below = [0.0] * 3, 0.0
        for row in pairs.valid[:, 0].nonzero()[:, 0].tolist():
            batches = (pairs.clean.inputs, pairs.corrupt.inputs)
            residuals, added = [], []
            for inputs in batches:
                x = model.embed(inputs[row : row + 1])
                for i, block in enumerate(model.blocks):
                    assert isinstance(block, Block)
                    for part, norm, name in (
                        (block.mixer, block.norm_mixer, "mixer"),
                        (block.mlp, block.norm_mlp, "transform"),
                    ):
                        if (i, name) == (layer, kind):
                            assert part is not None
                            assert norm is not None
                            residuals.append(x)
                            added.append(part(norm(x)))
                        x = x if part is None or norm is None else x + part(norm(x))
            whole, none = (model(inputs[row : row + 1])[0] for inputs in batches)
            for s, places in enumerate((pairs.key, pairs.value, pairs.query)):
                x = residuals[1] + added[1]
                for position in places[row].flatten().tolist():
                    x[0, position] = residuals[1][0, position] + added[0][0, position]
                block = model.blocks[layer]
                assert isinstance(block, Block)
                if kind == "mixer" and block.mlp is not None:
                    assert block.norm_mlp is not None
                    x = x + block.mlp(block.norm_mlp(x))
                for later in model.blocks[layer + 1 :]:
                    x = later(x)
                logits = model.head(model.norm_final(x))[0]
                for j in range(2):
                    above[s] += compute_margin(logits, pairs, row, j) - compute_margin(
                        none, pairs, row, j
                    )
            for j in range(2):
                below += compute_margin(whole, pairs, row, j) - compute_margin(none, pairs, row, j)
        assert found.share[n, :3].tolist() == pytest.approx([a / below for a in above], abs=1e-8)


@pytest.mark.parametrize("name", ["induction", "positional", "undecided, untrained"])
def test_planted_components_are_named_and_no_others(name):
    results = measure(Subject(mechanisms.TASK, MAKERS[name](), ROWS))
    found = [result for result in results if isinstance(result, Components)]
    if name == "induction":
        assert sorted(find_carriers(found[0])) == [(0, 1), (1, 2)]
        says = describe(found[0]).says
        assert "layer 0's mixer at the values 1.00 (" in says
        assert "placebo 0.00" in says
        assert draw(found[0]) is not None
    for one in found if name != "induction" else []:
        assert find_carriers(one) == []
        assert describe(one).says.startswith("No single component surely restores a third")


def test_a_component_is_named_by_chance_in_few_of_a_hundred_cases():
    """Shares that are a third, the least that is not named, with intervals from 12 rows."""
    rng, named = np.random.default_rng(0), 0
    for _ in range(100):
        rows = np.stack([rng.normal(1 / 3, 0.2, 12), np.ones(12)], 1)
        value, ends = estimate_share(rows, rng)
        share, interval = np.full((1, 4), value), np.tile(ends, (1, 4, 1)).astype(float)
        share[0, -1], interval[0, -1] = 0, (-0.01, 0.01)
        one = Components(np.zeros(1, int), ("mixer",), share, interval, 12, 24, 1)
        named += bool(find_carriers(one))
    # 2.5 % by the interval, which 12 rows make a point or two short; two standard errors are 4.
    assert named <= 8


def test_a_share_is_bold_where_its_interval_excludes_zero():
    share = np.array([[0.5, -0.5, 0.5, 0.0]])
    ends = np.array([[[0.1, 0.9], [-0.9, -0.1], [0.0, 1.0], [-1.0, 0.0]]])
    one = Components(np.zeros(1, int), ("mixer",), share, ends, 12, 24, 1)
    [heatmap] = one.draw().to_dict()["data"]
    assert [*heatmap["text"][0]] == ["<b>0.50</b>", "<b>-0.50</b>", "0.50", "0.00"]
