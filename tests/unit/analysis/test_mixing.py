"""A planted matrix has its mass where it was planted; a model's matrix is what it applies."""

import numpy as np
import pytest
import torch
from torch import nn

from analysis.base import NotApplicableError
from analysis.mixing import BlockMixer, collect_mixers
from lab.layers.mixer import MatrixMixer, adapt
from lab.models import build
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=32)


class Own(nn.Module):
    """A mixer of one's own, which gives whole matrices only."""

    def __init__(self, d_model: int, given: torch.Tensor | None = None):
        super().__init__()
        self.asked, self.given = 0, torch.ones(1, 16, 16).tril() if given is None else given

    def matrix(self, x):
        self.asked += 1
        return self.given.expand(len(x), -1, -1, -1)

    def values(self, x):
        return x[:, None]

    def project(self, x, z):
        return z[:, 0]

    def forward(self, x):
        return self.project(x, self.given @ self.values(x))


@pytest.mark.parametrize("entries", [2**22, 40])
def test_shares_are_those_of_a_loop_over_entries(entries, monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", entries)
    matrix = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).tril()
    matrix[:, 7] = 0
    mixer = BlockMixer(0, adapt(Own(8, matrix)), torch.zeros(1, 16, 8))
    targets, sources = np.indices((18, 16))
    found = mixer.measure_shares(0, targets, sources)
    assert found.shape == (2, 18, 16)
    for h, i, j in np.ndindex(found.shape):
        total = 0.0 if i > 15 else float(matrix[h, i].abs().sum())
        # Nothing lies after the end, in a row of zeros, or at a later source.
        expected = abs(float(matrix[h, i, j])) / total if total else 0.0
        assert found[h, i, j] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("AM", {"A.n_kv_heads": 1, "A.mask": "value", "A.window": 3}),
        ("AM", {"A.mask": "oracle"}),
        ("IM", {"I.n_values": 3}),
        ("SM", {"S.d_state": 4, "S.n_groups": 2}),
        ("SM", {"S.d_state": 4, "S.position": "conv", "S.gate": "norm"}),
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


def test_a_mixer_of_ones_own_is_asked_for_its_matrix_once(monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", 16)
    mixer = BlockMixer(0, adapt(Own(8)), torch.zeros(1, 16, 8))
    blocks = [block for _, block in mixer.blocks(0)]
    assert [len(block[0]) for block in blocks] == [1] * 16
    torch.testing.assert_close(torch.cat(blocks, dim=1), torch.ones(1, 16, 16).tril())
    assert mixer.module.asked == 1


class Wrong(Own):
    def matrix(self, x):
        raise KeyError("mine")


class Flat(Own):
    def matrix(self, x):
        return super().matrix(x)[:, 0]


class Lying(Own):
    def matrix(self, x):
        return 2 * super().matrix(x)


class Undefined(Own):
    def matrix(self, x):
        return super().matrix(x) * torch.nan


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Wrong, "Wrong.matrix raised KeyError: 'mine'"),
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
    monkeypatch.setattr("lab.models.architectures.load_class", lambda path: nn.Identity)
    model = build("UM NM AM", vocab_size=32, d_model=16, model="tests:Identity")
    found = collect_mixers(model, TASK.batch(split="test", size=1))
    assert [(m.layer, m.kind, isinstance(m.module, MatrixMixer)) for m in found] == [
        (0, "Identity", False),
        (2, "Attention", True),
    ]
