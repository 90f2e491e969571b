"""A planted matrix has its mass where it was planted; a model's matrix is what it applies."""

import numpy as np
import pytest
import torch
from torch import nn

from analysis.base import NotApplicableError
from analysis.links import AnswerLinks, find_links, measure_mass, measure_mass_by_blocks
from analysis.mixing import BlockMixer, collect_mixers
from lab.laws import MatrixMixer
from lab.layers.mixer import adapt
from lab.models import Block, build
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=32)
LINKS = AnswerLinks(queries=np.array([4, 6]), keys=np.array([0, 2]), values=np.array([1, 3]))


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
    found = measure_mass(matrix, LINKS)
    assert found.on_value[1] == pytest.approx(0.75)
    for h in range(2):
        assert found.on_value[h] == pytest.approx(brute(matrix[h], LINKS.queries, LINKS.values))
        assert found.on_key[h] == pytest.approx(brute(matrix[h], LINKS.queries, LINKS.keys))
        assert found.written[h] == pytest.approx(brute(matrix[h], LINKS.values, LINKS.keys))
        assert found.on_previous[h] == pytest.approx(brute(matrix[h], range(1, 8), range(7)))
    assert found.uniform_value == pytest.approx((1 / 5 + 1 / 7) / 2)


def test_a_uniform_matrix_has_the_uniform_mass():
    uniform = np.tri(8)[None] / np.arange(1, 9)[None, :, None]
    found = measure_mass(uniform, LINKS)
    assert found.on_value[0] == pytest.approx(found.uniform_value)
    assert found.on_previous[0] == pytest.approx(found.uniform_previous)


def test_a_row_of_zeros_counts_as_no_mass():
    found = measure_mass(np.zeros((1, 8, 8)), LINKS)
    assert found.on_value[0] == 0


@pytest.mark.parametrize("height", [1, 3, 8])
def test_mass_by_blocks_is_the_mass(height):
    matrix = planted()
    slices = [slice(first, min(8, first + height)) for first in range(0, 8, height)]
    found, whole = (
        measure_mass_by_blocks([(s, matrix[:, s]) for s in slices], LINKS),
        measure_mass(matrix, LINKS),
    )
    for name in ("on_value", "on_key", "written", "on_previous"):
        np.testing.assert_allclose(getattr(found, name), getattr(whole, name))
    assert found.uniform_previous == whole.uniform_previous


@pytest.mark.parametrize("stack", ["AM", "SM", "IM"])
@torch.no_grad()
def test_the_matrix_is_what_the_layer_applies(stack):
    model = build(stack, vocab_size=32, d_model=16, n_heads=2)
    batch = TASK.batch(split="test", size=3)
    before = model(batch.inputs)
    [mixer] = collect_mixers(model, batch)
    assert mixer.layer == 0
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.mixer is not None
    assert block.norm_mixer is not None
    assert isinstance(mixer.module, MatrixMixer)
    x = block.norm_mixer(model.embed(batch.inputs))
    torch.testing.assert_close(mixer.x, x)
    matrix = torch.stack([mixer.matrix(row) for row in range(3)])
    assert matrix.shape == (3, 2, 16, 16)
    assert not matrix.triu(1).any()
    applied = mixer.module.project(x, matrix @ mixer.module.values(x))
    torch.testing.assert_close(applied, block.mixer(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(model(batch.inputs), before)


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("AM", {}),
        ("AM", {"A.n_kv_heads": 1, "A.mask": "value", "A.window": 3}),
        ("AM", {"A.mask": "soft", "A.position": "none"}),
        ("AM", {"A.mask": "oracle"}),
        ("IM", {"I.n_values": 3}),
        ("SM", {"S.d_state": 4, "S.n_groups": 2}),
        ("SM", {"S.d_state": 4, "S.position": "conv", "S.gate": "norm"}),
        ("SM", {"S.d_state": 4, "S.position": "none"}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("entries", "multiple"), [(2**22, 1), (3 * 2 * 16, 1), (7 * 2 * 16, 4), (1, 5)]
)
@torch.no_grad()
def test_blocks_are_the_rows_of_the_matrix(stack, options, entries, multiple, monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", entries)
    model = build(stack, vocab_size=32, d_model=16, n_heads=2, options=options)
    mixer = collect_mixers(model, TASK.batch(split="test", size=2))[0]
    blocks, last = [], 0
    for rows, block in mixer.blocks(1, multiple):
        assert rows.start == last
        assert rows.start % multiple == 0
        assert block.shape == (2, rows.stop - rows.start, 16)
        assert block.numel() <= entries or len(block[0]) <= multiple
        blocks.append(block)
        last = rows.stop
    assert last == 16
    torch.testing.assert_close(torch.cat(blocks, dim=1), mixer.matrix(1))


@torch.no_grad()
@pytest.mark.parametrize(("large", "times"), [(2 * 16**2, 1), (2 * 16**2 + 1, 0)])
def test_a_large_matrix_leaves_no_gaps(large, times, monkeypatch):
    given = []
    monkeypatch.setattr("analysis.mixing.LARGE", large)
    monkeypatch.setattr("analysis.mixing.give_back_freed_memory", lambda: given.append(1))
    model = build("AM", vocab_size=32, d_model=16, n_heads=2)
    (mixer,) = collect_mixers(model, TASK.batch(size=1))
    assert sum(len(range(*rows.indices(16))) for rows, _ in mixer.blocks(0)) == 16
    assert len(given) == times


@torch.no_grad()
def test_an_oracle_mask_is_told_what_to_keep():
    model = build("AM", vocab_size=32, d_model=16, options={"A.mask": "oracle"})
    batch = TASK.batch(split="test", size=2)
    [mixer] = collect_mixers(model, batch)
    for row in range(2):
        assert not mixer.matrix(row)[0, 15, 8:].any()


class Own(nn.Module):
    """A mixer of one's own, which gives whole matrices only."""

    def __init__(self, d_model: int):
        super().__init__()
        self.asked = 0

    def matrix(self, x):
        self.asked += 1
        return torch.ones(len(x), 1, x.shape[1], x.shape[1]).tril()

    def values(self, x):
        return x[:, None]

    def project(self, x, z):
        return z[:, 0]

    def forward(self, x):
        return self.project(x, self.matrix(x) @ self.values(x))


class Wrong(Own):
    """Its matrix raises."""

    def matrix(self, x):
        raise KeyError("mine")


def test_a_mixer_of_ones_own_is_asked_for_its_matrix_once(monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", 16)
    mixer = BlockMixer(0, adapt(Own(8)), torch.zeros(1, 16, 8))
    blocks = [block for _, block in mixer.blocks(0)]
    assert [len(block[0]) for block in blocks] == [1] * 16
    torch.testing.assert_close(torch.cat(blocks, dim=1), torch.ones(1, 16, 16).tril())
    assert mixer.module.asked == 1


def test_a_mixer_that_raises_is_named():
    with pytest.raises(NotApplicableError, match=r"Wrong.matrix raised KeyError: 'mine'"):
        BlockMixer(0, adapt(Wrong(8)), torch.zeros(1, 16, 8)).matrix(0)


class Flat(Own):
    """Its matrix has no heads."""

    def matrix(self, x):
        return torch.ones(x.shape[0], x.shape[1], x.shape[1]).tril()

    def forward(self, x):
        return x


class Lying(Own):
    """Its matrix is twice what it applies."""

    def matrix(self, x):
        return 2 * super().matrix(x)

    def forward(self, x):
        return self.project(x, super().matrix(x) @ self.values(x))


class Undefined(Own):
    """Its matrix is not finite."""

    def matrix(self, x):
        return super().matrix(x) * torch.nan

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Flat, r"Flat.matrix is \[1, 16, 16\], must be \[b h t s\], \[1 h 16 16\]"),
        (Lying, r"Lying.matrix is not what forward applies: .* off by 1 of its largest output"),
        (Undefined, "Undefined.matrix is not finite"),
    ],
)
def test_a_matrix_that_is_none_is_refused(cls, why):
    x = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotApplicableError, match=why):
        BlockMixer(0, adapt(cls(8)), x).verify()
    BlockMixer(0, adapt(Own(8)), x).verify()


def test_a_mixer_without_matrix_and_a_block_without_mixer(monkeypatch):
    monkeypatch.setattr("lab.models.architectures.load_class", lambda path: Opaque)
    model = build("UM NM AM", vocab_size=32, d_model=16, model="tests:Opaque")
    found = collect_mixers(model, TASK.batch(split="test", size=1))
    assert [(m.layer, m.kind, isinstance(m.module, MatrixMixer)) for m in found] == [
        (0, "Opaque", False),
        (2, "Attention", True),
    ]


def test_padding_is_no_link():
    task = MQAR(seq_len=16, vocab_size=32).replace(n_pairs=(1, 4))
    for start in range(8):
        batch = task.batch(start=start, size=1)
        links = find_links(batch)
        queries = (batch.targets[0] != -100).nonzero()[:, 0].tolist()
        assert sorted(links.queries.tolist()) == queries
        assert (batch.targets[0, links.queries] == batch.inputs[0, links.values]).all()


def test_without_pairs_the_queries_are_the_scored_positions():
    batch = TASK.batch(size=1)
    links = find_links(type(batch)(batch.inputs, batch.targets, batch.roles, {}))
    assert links.queries.tolist() == [8, 10, 12, 14]
    assert len(links.values) == 0
    assert measure_mass(np.tri(16)[None], links).on_value.size == 0
