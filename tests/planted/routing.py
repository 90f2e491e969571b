"""Correct routing and retrieval in small methods, so that a fault can replace one."""

import torch
from torch import Tensor, nn

from tests.planted.attention import D_MODEL

EXPERTS, CHOSEN, WIDTH = 4, 2, 8
SIDE = 6
"""Keys of each half of the product keys."""


class RightExperts(nn.Module):
    """Each token chooses two of four experts, weighted by a softmax over all."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D_MODEL, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, D_MODEL, WIDTH) / D_MODEL**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, D_MODEL) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("btd, edf -> betf", x, self.up).relu()
        outputs = torch.einsum("betf, efd -> betd", hidden, self.down)
        return x + torch.einsum("bte, betd -> btd", self._compute_gates(self.router(x)), outputs)

    def _compute_gates(self, logits: Tensor) -> Tensor:
        """Return the weights [b t e] of the experts, zero where one is not chosen."""
        weights = self._compute_shares(logits)
        return weights * self._choose(weights)

    def _compute_shares(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1)

    def _choose(self, weights: Tensor) -> Tensor:
        return weights >= weights.topk(CHOSEN, dim=-1).values[..., -1:]


class Table(nn.Module):
    """Each token reads the row of a table that its first channel selects, and scales it."""

    n_rows = 20

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, D_MODEL)
        self.rows = nn.Parameter(torch.randn(self.n_rows, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        z = self.enter(x)
        share = torch.special.ndtr(z[..., 0].float())
        return x + z.sigmoid() * self.rows[self._choose_row(share)]

    def _choose_row(self, share: Tensor) -> Tensor:
        """Return the row that a number in [0, 1] selects."""
        return (share * self.n_rows).long().clamp(max=self.n_rows - 1)


class ProductKeys(nn.Module):
    """Retrieval of three of 36 values by product keys: two halves of a query, six keys each."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(D_MODEL, D_MODEL)
        self.keys = nn.Parameter(torch.randn(2, SIDE, D_MODEL // 2))
        self.values = nn.Parameter(torch.randn(SIDE**2, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (2, -1))
        scores, index = torch.einsum("btid, ikd -> btik", query, self.keys).topk(3, dim=-1)
        both = (scores[..., 0, :, None] + scores[..., 1, None, :]).flatten(-2)
        pairs = self._index_value(index[..., 0, :, None], index[..., 1, None, :]).flatten(-2)
        best, at = both.topk(3, dim=-1)
        values = self.values[pairs.gather(-1, at)]
        return x + (best.softmax(-1)[..., None] * values).sum(-2)

    def _index_value(self, first: Tensor, second: Tensor) -> Tensor:
        return first * SIDE + second
