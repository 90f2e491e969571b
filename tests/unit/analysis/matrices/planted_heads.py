"""A mixer whose matrix the test gives, with rows and models to plant it in."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis.base import Subject
from analysis.matrices.heads import sum_row
from analysis.mixing import BlockMixer
from lab.layers.mixer import adapt
from lab.models import LanguageModel, build
from tasks.base import Batch
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=32)

TOKENS = torch.tensor([3, 5, 3, 7, 5, 5, 3, 9, 7, 1])
"""Repeats, one at once (5 5), and a token that never returns."""


class GivenMatrix(nn.Module):
    """A mixer whose matrix is given."""

    def __init__(self, d_model: int):
        super().__init__()
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.given = torch.ones(2, 16, 16).tril()

    def matrix(self, x: Tensor) -> Tensor:
        return self.given.expand(len(x), *self.given.shape)

    def values(self, x: Tensor) -> Tensor:
        return torch.stack(x.chunk(self.given.shape[0], dim=-1), dim=1)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return self.out(torch.cat(z.unbind(1), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, self.matrix(x)[:, :, : x.shape[1], : x.shape[1]] @ self.values(x))


def make_mixer(matrix: Tensor, kind: type[GivenMatrix] = GivenMatrix, rows: int = 1) -> BlockMixer:
    torch.manual_seed(0)
    module = kind(4 * len(matrix))
    module.given = matrix
    with torch.no_grad():
        return BlockMixer(0, adapt(module), torch.randn(rows, matrix.shape[1], 4 * len(matrix)))


def sum_planted_row(matrix: Tensor, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    with torch.no_grad():
        return sum_row(make_mixer(matrix), 0, tokens, np.random.default_rng(0))


def draw_matrix(n_heads: int = 2, seq_len: int = 10) -> Tensor:
    """Signed, and unlike from head to head."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n_heads, seq_len, seq_len, generator=generator).tril()


def build_pattern(kind: str, tokens: list[int]) -> list[list[float]]:
    """Return the 0/1 matrix P, by TransformerLens's definitions in words."""
    size = len(tokens)
    found = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            if kind == "previous token":
                found[i][j] = float(j == i - 1)
            elif kind == "duplicate token":
                found[i][j] = float(j < i and tokens[j] == tokens[i])
            elif kind == "induction":
                found[i][j] = float(j >= 1 and j - 1 < i and tokens[j - 1] == tokens[i])
            else:
                found[i][j] = float(j == 0 and i > 0)
    return found


def build_subject(
    stack: str = "AM*2", rows: int = 4, model: LanguageModel | None = None, **options: Any
) -> Subject:
    if model is None:
        model = build(stack, vocab_size=32, d_model=16, n_heads=2, options=options)
    return Subject(TASK, model.eval(), TASK.batch(split="test", size=rows))


def build_with_mixer(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], stack: str
) -> LanguageModel:
    monkeypatch.setattr("lab.models.architectures.load_class", lambda path: kind)
    return build(stack, vocab_size=32, d_model=16, model="tests:Mixer")


def repeat_rows(found: Subject) -> Subject:
    """Return a subject whose row comes twice: what is planted for it is then sure."""
    batch = found.batch
    twofold = Batch(
        batch.inputs.repeat(2, 1),
        batch.targets.repeat(2, 1),
        batch.roles.repeat(2, 1),
        {name: link.repeat(2, 1) for name, link in batch.links.items()},
    )
    return replace(found, batch=twofold)


def plant(model: LanguageModel, layer: int, batch: Batch, kinds: tuple[str, str]) -> None:
    """Give a layer one head of each kind; where a kind has no position, the head is uniform."""
    module = model.get_submodule(f"blocks.{layer}.mixer")
    assert isinstance(module, GivenMatrix)
    uniform = torch.ones(16, 16).tril() / torch.arange(1, 17)[:, None]
    given = []
    for kind in kinds:
        pattern = torch.tensor(build_pattern(kind, batch.inputs[0].tolist()))
        share = pattern / pattern.sum(-1, keepdim=True).clamp(min=1)
        given.append(torch.where(pattern.sum(-1, keepdim=True) > 0, share, uniform))
    module.given = torch.stack(given)
