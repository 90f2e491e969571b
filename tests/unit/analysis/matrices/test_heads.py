"""Heads by their matrices: sums are loops, planted heads are named, entries weigh what they move.

Nothing is invented where there is nothing to see.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from analysis.figures.heads import LINES
from analysis.matrices import heads, rollout
from analysis.matrices.heads import (
    PATTERNS,
    HeadReach,
    HeadScores,
    compute_uniform_shares,
    measure_moves,
    sum_row,
)
from analysis.mixing import BlockMixer, collect_mixers
from analysis.plain import to_plain
from lab.files import RunError
from lab.hooks import run_with_cache
from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.ssd import SSD
from lab.models import build
from tests.unit.analysis.matrices.planted_heads import (
    TOKENS,
    GivenMatrix,
    build_pattern,
    build_subject,
    build_with_mixer,
    draw_matrix,
    make_mixer,
    plant,
    repeat_rows,
    sum_planted_row,
)


def detect(matrix: Tensor, kind: str, tokens: list[int]) -> float:
    """Return Σ A·P / Σ A over rows in which P has any, the detector's "mul"."""
    pattern, hit, able = build_pattern(kind, tokens), 0.0, 0.0
    for i in range(len(tokens)):
        row = [abs(a) for a in matrix[i].tolist()]
        hit += sum(a * p for a, p in zip(row, pattern[i], strict=True))
        able += sum(row) if any(pattern[i]) else 0.0
    return hit / able


@pytest.mark.parametrize("block", [2**22, 30])
def test_scores_are_transformer_lenses_by_loops(block, monkeypatch):
    """`head_detector.compute_head_attention_similarity_score(error_measure="mul")`, restated."""
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", block)
    matrix = draw_matrix()
    found = sum_planted_row(matrix)
    for h in range(2):
        for p, kind in enumerate(PATTERNS):
            share = float(found["on_patterns"][h, p] / found["with_patterns"][h, p])
            expected = detect(matrix[h], kind, TOKENS.tolist())
            assert share == pytest.approx(expected, rel=1e-5)


def test_chance_is_the_loop_over_a_uniform_matrix():
    uniform = torch.ones(10, 10).tril() / torch.arange(1, 11)[:, None]
    expected = [detect(uniform, kind, TOKENS.tolist()) for kind in PATTERNS]
    assert compute_uniform_shares(TOKENS).tolist() == pytest.approx(expected, rel=1e-5)
    # Without repeats there is no chance of a duplicate.
    share = compute_uniform_shares(torch.arange(6))
    assert share.isnan().tolist() == [False, True, True, False]


def test_effective_keys_are_of_torchs_entropy_over_rows_with_mass():
    matrix = draw_matrix()
    expected = Categorical(probs=matrix.abs()).entropy().exp()
    torch.testing.assert_close(sum_planted_row(matrix)["effective_keys"], expected.mean(-1))
    matrix[:, 5:] = 0
    found = sum_planted_row(matrix)
    torch.testing.assert_close(found["effective_keys"], expected[:, :5].mean(-1))


def test_distance_is_the_loop():
    matrix = draw_matrix()
    far = [
        sum(abs(matrix[h, i, j]) * (i - j) for i in range(10) for j in range(10)) for h in (0, 1)
    ]
    expected = torch.tensor(far) / matrix.abs().sum((1, 2))
    torch.testing.assert_close(sum_planted_row(matrix)["distance"], expected)
    assert sum_planted_row(torch.eye(10).roll(1, 0).tril()[None])["distance"] == 1


def test_planted_heads_are_named_and_uniform_ones_are_not(monkeypatch):
    model = build_with_mixer(monkeypatch, GivenMatrix, "UM*2")
    plain_one = repeat_rows(build_subject(rows=1, model=model))
    for layer in (0, 1):
        kinds = (("previous token", "first token"), ("induction", "duplicate token"))[layer]
        plant(model, layer, plain_one.batch, kinds)
    scores, _ = heads.measure(plain_one)
    assert isinstance(scores, HeadScores)
    shown = scores.find_patterns()
    named = {(int(scores.layers[h]), int(scores.heads[h]), PATTERNS[p]) for h, p in shown}
    planted_ones = {
        (0, 0, "previous token"),
        (0, 1, "first token"),
        (1, 0, "induction"),
        (1, 1, "duplicate token"),
    }
    assert named == planted_ones
    np.testing.assert_allclose([scores.shares[h, p] for h, p in shown], 1.0, rtol=1e-5)
    for layer in (0, 1):
        module = model.get_submodule(f"blocks.{layer}.mixer")
        assert isinstance(module, GivenMatrix)
        module.given = torch.ones(2, 16, 16).tril() / torch.arange(1, 17)[:, None]
    scores, reach = heads.measure(plain_one)
    assert isinstance(scores, HeadScores)
    assert isinstance(reach, HeadReach)
    np.testing.assert_allclose(scores.shares, np.tile(scores.chance, (4, 1)), rtol=1e-5)
    np.testing.assert_allclose(reach.effective_keys, reach.uniform_keys, rtol=1e-5)
    np.testing.assert_allclose(reach.distance, reach.uniform_distance, rtol=1e-5)
    assert scores.find_patterns() == []


def test_intervals_are_of_the_mean_over_rows():
    found = build_subject(rows=16)
    scores, _ = heads.measure(found)
    assert isinstance(scores, HeadScores)
    [first, _] = collect_mixers(found.model, found.batch)
    with torch.no_grad():
        sums = [
            sum_row(first, r, found.batch.inputs[r], np.random.default_rng(0)) for r in range(16)
        ]
    shares = torch.stack([of["on_patterns"] / of["with_patterns"] for of in sums])[:, 0, 0].numpy()
    assert scores.shares[0, 0] == pytest.approx(shares.mean(), rel=1e-5)
    half = 1.96 * shares.std(ddof=1) / 4
    assert scores.half_widths[0, 0] == pytest.approx(half, rel=1e-3)


def test_many_heads_share_lines_and_every_head_is_drawn():
    model = build("AM*7", vocab_size=32, d_model=16, n_heads=4)
    for result in heads.measure(build_subject(model=model)):
        fig = result.figure()
        assert fig is not None
        dots = [trace["text"] for trace in fig.to_dict()["data"] if trace["mode"] == "markers"]
        assert len(dots) >= 2
        assert all(len(names) == 28 > LINES for names in dots)
        assert list(fig.layout["yaxis"]["ticktext"]) == [str(layer) for layer in range(7)]
        assert to_plain(result)["layers"] == [layer for layer in range(7) for _ in range(4)]


def test_a_single_row_is_sure_of_no_head_and_no_recall(monkeypatch):
    model = build_with_mixer(monkeypatch, GivenMatrix, "UM*2")
    found = build_subject(rows=1, model=model)
    plant(model, 0, found.batch, ("previous token", "previous token"))
    plant(model, 1, found.batch, ("induction", "induction"))
    scores, _ = heads.measure(found)
    assert isinstance(scores, HeadScores)
    assert scores.find_patterns() == []
    [result] = rollout.measure(found)
    assert np.isnan(result.interval).all()


def test_heads_without_mass_are_said_to_have_none():
    model = build("SM", vocab_size=32, d_model=16, options={"S.skip": False})
    with torch.no_grad():
        model.get_parameter("blocks.0.mixer.B_proj.weight").zero_()
    for result in heads.measure(build_subject(model=model)):
        assert result.says == "No head has any mass."


class Squashed(GivenMatrix):
    """Its project is not linear."""

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return super().project(x, z).tanh()


class Gated(GivenMatrix):
    """Its project is linear, but not the same at every position."""

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return super().project(x, z) * x


class Raising(GivenMatrix):
    """Its project raises."""

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Attention, {"n_kv_heads": 1}),
        (InnerFunctionAttention, {"n_values": 3}),
        (SSD, {"n_groups": 2, "d_state": 4}),
        (SSD, {"d_state": 4, "position": "conv", "d_inner": 24}),
        (SSD, {"d_state": 4, "gate": "silu", "d_inner": 8}),
        (SSD, {"d_state": 4, "gate": "norm", "n_groups": 2}),
    ],
    ids=str,
)
@torch.no_grad()
def test_an_entry_weighs_what_it_moves(kind: type[Attention] | type[SSD], options: dict[str, Any]):
    """The parts M_ij W_O (g_i ⊙ v_j), written out one by one, add up to the layer's output."""
    torch.manual_seed(0)
    module, x = kind(16, 2, **options), torch.randn(1, 7, 16)
    chosen, norms = measure_moves(BlockMixer(0, module, x), 0, np.random.default_rng(0))(
        torch.arange(7)
    )
    assert chosen.tolist() == list(range(7))
    matrix, values = module.matrix(x)[0], module.values(x)[0]
    norms_by_hand, total = torch.zeros(2, 7, 7), torch.zeros(7, 16)
    weight = module.out.weight if isinstance(module, Attention) else module.out_proj.weight
    for h in range(2):
        width = values.shape[-1]
        some = slice(h * width, (h + 1) * width)
        for i in range(7):
            gate = compute_gate(module, x, i)[some]
            for j in range(i + 1):
                part = weight[:, some] @ (gate * values[h, j])
                norms_by_hand[h, i, j] = part.norm()
                total[i] += matrix[h, i, j] * part
    torch.testing.assert_close(total, module(x)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms.tril(), norms_by_hand, rtol=1e-4, atol=1e-5)


def compute_gate(module: nn.Module, x: Tensor, i: int) -> Tensor:
    """Return what multiplies the mixed values at a position, the norm's scale included."""
    if not isinstance(module, SSD) or module.z_proj is None:
        return torch.ones(64)
    gate = nn.functional.silu(module.z_proj(x[0, i]))
    if module.norm_weight is None:
        return gate
    mixed = run_with_cache(module, x, "hook_ssm_out")[1]["hook_ssm_out"][0, i].flatten() * gate
    halves = [half.square().mean().add(1e-5).rsqrt().expand(len(half)) for half in mixed.chunk(2)]
    return gate * torch.cat(halves) * module.norm_weight


def test_weights_are_those_of_the_rows_they_stand_in(monkeypatch):
    """Some rows of a gated layer's matrix, met by blocks, as all at once."""
    torch.manual_seed(0)
    mixer = BlockMixer(0, SSD(16, 2, d_state=4, gate="silu"), torch.randn(1, 10, 16))
    with torch.no_grad():
        whole = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", 60)
        monkeypatch.setattr(heads, "BLOCK_ENTRIES", 60)
        blocks = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        monkeypatch.setattr(heads, "GATED_TARGETS", 4)
        some = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        rows = np.sort(np.random.default_rng(0).choice(10, size=4, replace=False))
        norms = measure_moves(mixer, 0, np.random.default_rng(0))(torch.arange(10))[1]
    torch.testing.assert_close(blocks["moved_on_patterns"], whole["moved_on_patterns"])
    size = mixer.matrix(0).detach().abs()[:, rows] * norms
    previous = sum(size[:, n, i - 1] for n, i in enumerate(rows.tolist()) if i)
    assert isinstance(previous, Tensor)
    torch.testing.assert_close(some["moved_on_patterns"][:, 0], previous)


@pytest.mark.parametrize("kind", [Squashed, Gated])
def test_a_project_that_is_not_linear_has_no_norms(kind):
    with torch.no_grad():
        found = sum_row(make_mixer(draw_matrix(), kind), 0, TOKENS, np.random.default_rng(0))
    assert found["moved_on_patterns"].isnan().all()
    assert not found["on_patterns"].isnan().any()


def test_a_project_that_raises_is_named():
    with pytest.raises(RunError, match=r"Raising.project raised KeyError: 'mine'"):
        measure_moves(make_mixer(draw_matrix(), Raising), 0, np.random.default_rng(0))
