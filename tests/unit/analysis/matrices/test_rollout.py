"""A rollout is the product of the layers' matrices, and shows recall by its interval."""

import pytest
import torch
from torch import nn

from analysis.base import NotApplicableError
from analysis.matrices import heads, rollout
from analysis.mixing import collect_mixers
from analysis.plain import to_plain
from lab.models import build
from tests.unit.analysis.matrices.planted_heads import (
    GivenMatrix,
    build_subject,
    build_with_mixer,
    plant,
    repeat_rows,
)


def test_without_a_matrix_nothing_applies(monkeypatch):
    model = build_with_mixer(monkeypatch, nn.Identity, "UM NM")
    found = build_subject(model=model)
    with pytest.raises(NotApplicableError, match="no block has a mixer that offers a matrix"):
        heads.measure(found)
    with pytest.raises(NotApplicableError, match="layer 0, Identity, offers no matrix"):
        rollout.measure(found)
    none = build("NM", vocab_size=32, d_model=16)
    with pytest.raises(NotApplicableError, match="no block has a sequence mixer"):
        rollout.measure(build_subject(model=none))


@pytest.mark.parametrize("block", [2**22, 40])
@torch.no_grad()
def test_rollout_is_the_product_and_its_rows_sum_to_one(block, monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", block)
    found = build_subject("AM NM SM IM", rows=2)
    layers = collect_mixers(found.model, found.batch)
    expected = torch.eye(16)
    for mixer in layers:
        size = mixer.matrix(1).abs()
        mean = [[sum(size[h, i, j] for h in (0, 1)) / 2 for j in range(16)] for i in range(16)]
        share = torch.tensor([[entry / sum(row) for entry in row] for row in mean])
        expected = (0.5 * torch.eye(16) + 0.5 * share) @ expected
    rolled = rollout.multiply_layers(layers, 1)
    torch.testing.assert_close(rolled, expected)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(16))
    assert not rolled.triu(1).any()


def test_rollout_finds_a_planted_induction_circuit(monkeypatch):
    """Keys are written to values, queries look at what followed: ¼ of a query is its value."""
    model = build_with_mixer(monkeypatch, GivenMatrix, "UM*2")
    found = repeat_rows(build_subject(rows=1, model=model))
    plant(model, 0, found.batch, ("previous token", "previous token"))
    plant(model, 1, found.batch, ("induction", "induction"))
    [result] = rollout.measure(found)
    assert 0.1 < result.on_value.mean() <= 0.25 + 1e-6
    for layer in (0, 1):
        module = model.get_submodule(f"blocks.{layer}.mixer")
        assert isinstance(module, GivenMatrix)
        module.given = torch.ones(2, 16, 16).tril()
    [result] = rollout.measure(found)
    assert result.on_value.mean() == pytest.approx(result.uniform_value, rel=1e-5)
    assert result.on_self.mean() == pytest.approx(result.uniform_self, rel=1e-5)
    assert "shown" not in to_plain(result)
