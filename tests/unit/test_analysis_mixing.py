"""A planted matrix has its mass where it was planted; a model's matrix is what it applies."""

import numpy as np
import pytest
import torch
from torch import nn

from analysis.mixing import Links, layer_matrices, mass, row_links
from lab.laws import MatrixMixer
from lab.models import Block, build
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=32)
LINKS = Links(queries=np.array([4, 6]), keys=np.array([0, 2]), values=np.array([1, 3]))


class Opaque(nn.Module):
    """A mixer that offers no matrix."""

    def __init__(self, d_model: int):
        super().__init__()
        self.line = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.line(x)


def planted() -> np.ndarray:
    """Two heads of 8 × 8; head 1 puts ¾ of a query's mass, negative, on its value."""
    matrix = np.tril(np.random.default_rng(0).uniform(0.1, 1, (2, 8, 8)))
    matrix[1, LINKS.queries] = 0
    matrix[1, LINKS.queries, LINKS.queries] = 1.0
    matrix[1, LINKS.queries, LINKS.values] = -3.0
    matrix[:, ~np.tri(8, dtype=bool)] = np.nan
    return matrix


def brute(matrix, rows, columns):
    shares = []
    for i, j in zip(rows, columns, strict=True):
        total = sum(abs(matrix[i, s]) for s in range(i + 1))
        shares.append(abs(matrix[i, j]) / total)
    return sum(shares) / len(shares)


def test_mass_is_the_loop_over_rows():
    matrix = planted()
    found = mass(matrix, LINKS)
    assert found.on_value[1] == pytest.approx(0.75)
    for h in range(2):
        assert found.on_value[h] == pytest.approx(brute(matrix[h], LINKS.queries, LINKS.values))
        assert found.on_key[h] == pytest.approx(brute(matrix[h], LINKS.queries, LINKS.keys))
        assert found.written[h] == pytest.approx(brute(matrix[h], LINKS.values, LINKS.keys))
        assert found.on_previous[h] == pytest.approx(brute(matrix[h], range(1, 8), range(7)))
    assert found.uniform_value == pytest.approx((1 / 5 + 1 / 7) / 2)


def test_a_uniform_matrix_has_the_uniform_mass():
    uniform = np.tri(8)[None] / np.arange(1, 9)[None, :, None]
    found = mass(uniform, LINKS)
    assert found.on_value[0] == pytest.approx(found.uniform_value)
    assert found.on_previous[0] == pytest.approx(found.uniform_previous)


def test_a_row_of_zeros_counts_as_no_mass():
    found = mass(np.zeros((1, 8, 8)), LINKS)
    assert found.on_value[0] == 0


@pytest.mark.parametrize("stack", ["AM", "SM", "IM"])
def test_the_matrix_is_what_the_layer_applies(stack):
    model = build(stack, vocab_size=32, d_model=16, n_heads=2)
    batch = TASK.batch(split="test", size=1)
    before = model(batch.inputs)
    [(layer, mixer, matrix)] = layer_matrices(model, batch)
    assert layer == 0
    assert matrix is not None
    assert matrix.shape == (2, 16, 16)
    upper = ~np.tri(16, dtype=bool)
    assert np.isnan(matrix[:, upper]).all()
    assert not np.isnan(matrix[:, ~upper]).any()
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.mixer is not None
    assert block.norm_mixer is not None
    assert isinstance(mixer, MatrixMixer)
    x = block.norm_mixer(model.embed(batch.inputs))
    applied = mixer.project(x, torch.from_numpy(np.nan_to_num(matrix))[None] @ mixer.values(x))
    torch.testing.assert_close(applied, block.mixer(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(model(batch.inputs), before)


def test_an_oracle_mask_is_told_what_to_keep():
    model = build("AM", vocab_size=32, d_model=16, options={"A.mask": "oracle"})
    [(_, _, matrix)] = layer_matrices(model, TASK.batch(split="test", size=1))
    assert matrix is not None
    assert (matrix[0, 15, 8:] == 0).all()


def test_a_mixer_without_matrix_and_a_block_without_mixer(monkeypatch):
    monkeypatch.setattr("lab.models.load_class", lambda path: Opaque)
    model = build("UM NM AM", vocab_size=32, d_model=16, model="tests:Opaque")
    found = layer_matrices(model, TASK.batch(split="test", size=1))
    assert [(i, type(m).__name__, w is None) for i, m, w in found] == [
        (0, "Opaque", True),
        (2, "Attention", False),
    ]


def test_padding_is_no_link():
    task = MQAR(seq_len=16, vocab_size=32, n_pairs=(1, 4))
    for start in range(8):
        batch = task.batch(start=start, size=1)
        links = row_links(batch)
        queries = (batch.targets[0] != -100).nonzero()[:, 0].tolist()
        assert sorted(links.queries.tolist()) == queries
        assert (batch.targets[0, links.queries] == batch.inputs[0, links.values]).all()


def test_without_pairs_the_queries_are_the_scored_positions():
    batch = TASK.batch(size=1)
    links = row_links(type(batch)(batch.inputs, batch.targets, batch.roles, {}))
    assert links.queries.tolist() == [8, 10, 12, 14]
    assert len(links.values) == 0
    assert mass(np.tri(16)[None], links).on_value.size == 0
