"""Edges have the scores of the layer; placebos and random edges are what they should be."""

import math

import numpy as np
import pytest
import torch

from analysis.frequencies.edges import link_edges, multiply_sides, sample_edges, sample_placebo
from analysis.frequencies.rotation import (
    measure_rotated_sides,
)
from tests.unit.analysis.frequencies.models import CASES, TASK, build_subject, score_directly


@pytest.mark.parametrize("case", ["shared keys", "SSD in tiled groups"])
@torch.no_grad()
def test_edges_have_the_scores_of_the_layer(case):
    stack, options = CASES[case]
    given = build_subject(stack, options)
    edges = link_edges(given.batch, "query_pos", "value_pos")
    assert (edges.targets > edges.sources).all()
    [(found, products)] = measure_rotated_sides(
        given.model, given.batch, lambda r: (r, multiply_sides(r, edges))
    )
    score, _ = score_directly(found, given.model, given.batch)
    added = (products * found.turn(edges.lags)[:, None]).real
    for e, (b, t, s) in enumerate(zip(edges.rows, edges.targets, edges.sources, strict=True)):
        for h, c in enumerate(found.groups):
            assert added[e, c].sum().item() == pytest.approx(score[b, h, t, s].item(), abs=1e-10)


def test_a_placebo_has_the_lags_and_rows_of_its_edges():
    batch = TASK.batch(split="test", size=64)
    edges = link_edges(batch, "value_pos", "key_pos")
    placebo = sample_placebo(edges, 16, np.random.default_rng(0))
    assert torch.equal(placebo.lags, edges.lags)
    assert torch.equal(placebo.rows, edges.rows)
    assert placebo.sources.min() == 0
    assert placebo.targets.max() == 15


def test_causal_edges_are_all_as_likely():
    batch = TASK.batch(split="test", size=2)
    count = 200_000
    edges = sample_edges(batch, count, np.random.default_rng(0))
    seen = np.zeros((2, 16, 16))
    np.add.at(seen, tuple(part.numpy() for part in vars(edges).values()), 1)
    lower = np.tri(16, dtype=bool)
    assert (seen[:, ~lower] == 0).all()
    expected = count / (2 * lower.sum())
    # A count's standard deviation is near √735 = 27; six of them among 272.
    assert np.abs(seen[:, lower] - expected).max() < 6 * math.sqrt(expected)
