"""An entry of a matrix weighs what it moves in the layer's output."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis.matrices import moves
from analysis.matrices.moves import Moves
from analysis.matrices.row_sums import sum_row
from analysis.mixing import Mixer
from lab.files import RunError
from lab.hooks import run_with_cache
from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.ssd import SSD
from tests.unit.analysis.matrices.planted_heads import TOKENS, GivenMatrix, draw_matrix, make_mixer


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
    entries = Moves.of(Mixer(0, module, x), 0, np.random.default_rng(0))
    chosen, norms = entries.compute_norms(torch.arange(7))
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
    mixer = Mixer(0, SSD(16, 2, d_state=4, gate="silu"), torch.randn(1, 10, 16))
    with torch.no_grad():
        whole = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", 60)
        monkeypatch.setattr(moves, "BLOCK_ENTRIES", 60)
        blocks = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        monkeypatch.setattr(moves, "GATED_TARGETS", 4)
        some = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        rows = np.sort(np.random.default_rng(0).choice(10, size=4, replace=False))
        norms = Moves.of(mixer, 0, np.random.default_rng(0)).compute_norms(torch.arange(10))[1]
    torch.testing.assert_close(blocks.moved_on_patterns, whole.moved_on_patterns)
    size = mixer.matrix(0).detach().abs()[:, rows] * norms
    previous = sum(size[:, n, i - 1] for n, i in enumerate(rows.tolist()) if i)
    assert isinstance(previous, Tensor)
    torch.testing.assert_close(some.moved_on_patterns[:, 0], previous)


@pytest.mark.parametrize("kind", [Squashed, Gated])
def test_a_project_that_is_not_linear_has_no_norms(kind):
    with torch.no_grad():
        found = sum_row(make_mixer(draw_matrix(), kind), 0, TOKENS, np.random.default_rng(0))
    assert found.moved_on_patterns.isnan().all()
    assert not found.on_patterns.isnan().any()


def test_a_project_that_raises_is_named():
    with pytest.raises(RunError, match=r"Raising.project raised KeyError: 'mine'"):
        Moves.of(make_mixer(draw_matrix(), Raising), 0, np.random.default_rng(0))
