"""Sums over a row's matrices are the loops, and a planted head has the score planted."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from analysis.matrices.patterns import PATTERNS, compute_uniform_shares
from tests.unit.analysis.matrices.planted_heads import (
    TOKENS,
    build_pattern,
    draw_matrix,
    sum_planted_row,
)


def detect(matrix: Tensor, kind: str, tokens: list[int]) -> tuple[float, float]:
    """Return Σ A·P / Σ A, the detector's "mul", and the same over rows in which P has any."""
    pattern, hit, mass, able = build_pattern(kind, tokens), 0.0, 0.0, 0.0
    for i in range(len(tokens)):
        row = [abs(a) for a in matrix[i].tolist()]
        hit += sum(a * p for a, p in zip(row, pattern[i], strict=True))
        mass += sum(row)
        able += sum(row) if any(pattern[i]) else 0.0
    return hit / mass, hit / able


@pytest.mark.parametrize("block", [2**22, 30])
def test_scores_are_transformer_lenses_by_loops(block, monkeypatch):
    """`head_detector.compute_head_attention_similarity_score(error_measure="mul")`, restated."""
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", block)
    matrix = draw_matrix()
    found = sum_planted_row(matrix)
    for h in range(2):
        for p, kind in enumerate(PATTERNS):
            score, share = detect(matrix[h], kind, TOKENS.tolist())
            on = float(found.on_patterns[h, p])
            assert on / float(found.mass[h]) == pytest.approx(score, rel=1e-5)
            assert on / float(found.with_patterns[h, p]) == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_planted_head_has_a_share_of_one(kind):
    pattern = torch.tensor(build_pattern(kind, TOKENS.tolist()))
    # Rows without such a position look at themselves, and say nothing of the head.
    matrix = torch.where(pattern.sum(-1, keepdim=True) > 0, pattern, torch.eye(10))
    found = sum_planted_row(-matrix[None])
    share = found.on_patterns / found.with_patterns
    assert share[0, PATTERNS.index(kind)] == pytest.approx(1.0)


def test_chance_is_the_loop_over_a_uniform_matrix():
    uniform = torch.ones(10, 10).tril() / torch.arange(1, 11)[:, None]
    score, share = compute_uniform_shares(TOKENS)
    for p, kind in enumerate(PATTERNS):
        expected = detect(uniform, kind, TOKENS.tolist())
        # Σ over rows of the share, not of mass, for a matrix whose rows all have a mass of 1.
        assert (float(score[p]), float(share[p])) == pytest.approx(expected, rel=1e-5)


def test_without_repeats_there_is_no_chance_of_a_duplicate():
    share = compute_uniform_shares(torch.arange(6))[1]
    assert share.isnan().tolist() == [False, True, True, False]


def test_entropy_is_torchs_and_a_uniform_row_has_as_many_keys_as_it_sees():
    matrix = draw_matrix()
    found = sum_planted_row(matrix)
    expected = Categorical(probs=matrix.abs()).entropy()
    torch.testing.assert_close(found.entropy, expected.mean(-1))
    torch.testing.assert_close(found.effective_keys, expected.exp().mean(-1))
    uniform = sum_planted_row(torch.ones(1, 10, 10).tril() * 0.3)
    assert float(uniform.effective_keys) == pytest.approx(np.arange(1, 11).mean(), rel=1e-5)


def test_a_row_without_mass_counts_for_nothing():
    matrix = torch.ones(1, 10, 10).tril()
    matrix[0, 5:] = 0
    found = sum_planted_row(matrix)
    assert float(found.effective_keys) == pytest.approx(3.0, rel=1e-5)
    assert float(found.entropy) == pytest.approx(math.log(120) / 5, rel=1e-5)


def test_distance_is_the_loop():
    matrix = draw_matrix()
    far = [
        sum(abs(matrix[h, i, j]) * (i - j) for i in range(10) for j in range(10)) for h in (0, 1)
    ]
    expected = torch.tensor(far) / matrix.abs().sum((1, 2))
    torch.testing.assert_close(sum_planted_row(matrix).distance, expected)
    assert sum_planted_row(torch.eye(10).roll(1, 0).tril()[None]).distance == 1


def test_neither_sign_nor_scale_nor_the_name_of_a_token_matters():
    matrix, signs = draw_matrix(), torch.randn(10, 10).sign()
    renamed = torch.randperm(32)[TOKENS]
    found, other = sum_planted_row(matrix), sum_planted_row(-3 * matrix * signs, renamed)
    for name in ("entropy", "effective_keys", "distance"):
        torch.testing.assert_close(getattr(found, name), getattr(other, name))
    torch.testing.assert_close(other.on_patterns, 3 * found.on_patterns)
