"""Small language models: one of packed documents in the manner of modded-nanogpt and nanochat.

There a row holds several documents, each begun by a token, and attention ends at their borders and
at a window.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.attention import (
    D_MODEL,
    HEADS,
    RightAttention,
    compute_lags,
    merge,
    rotate,
    split,
)
from tests.planted.cached import Cache, WindowedCache

VOCABULARY, BIGRAMS = 40, 64
GATES = 4
"""Channels that a smear's gate reads."""
WINDOWS = (4, 16)
"""The window of each layer."""


class PackedModel(nn.Module):
    """A language model of packed documents, in small methods, so that a fault can replace one.

    Bigrams have a hashed table, each token's vector is smeared with the one before, and values are
    mixed with embeddings of their own. Queries and keys are normalised, projections begin at zero,
    every layer reads the first vectors again, and the logits are capped.
    """

    bos_token_id = 0

    def __init__(self):
        super().__init__()
        self.tokens, self.bigrams = (nn.Embedding(n, D_MODEL) for n in (VOCABULARY, BIGRAMS))
        self.values = nn.Embedding(VOCABULARY, D_MODEL)
        self.gate = nn.Linear(GATES, 1, bias=False)
        self.read = nn.ModuleList(nn.Linear(D_MODEL, 3 * D_MODEL, bias=False) for _ in WINDOWS)
        self.write = nn.ModuleList(nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in WINDOWS)
        self.up = nn.ModuleList(nn.Linear(D_MODEL, 32, bias=False) for _ in WINDOWS)
        self.down = nn.ModuleList(nn.Linear(32, D_MODEL, bias=False) for _ in WINDOWS)
        self.mixes = nn.Parameter(torch.tensor([[1.0, 0.1, 0.5]] * len(WINDOWS)))
        self.head = nn.Linear(D_MODEL, VOCABULARY, bias=False)
        for zero in (*self.write, *self.down):
            nn.init.zeros_(zero.get_parameter("weight"))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [b t] to logits [b t v]."""
        first = self._normalise(self._smear(self.tokens(tokens)))
        first = first + 0.1 * self.bigrams(self._hash(tokens))
        x, seen = first, self._see(tokens)
        for i, window in enumerate(WINDOWS):
            keep, again, own = self.mixes[i]
            x = keep * x + again * first
            q, k, v = (split(z, HEADS) for z in self.read[i](self._normalise(x)).chunk(3, -1))
            v = v + own * split(self.values(tokens), HEADS)
            near = seen & (self._count_lags(tokens.shape[1]) < window)
            x = x + self.write[i](merge(self._attend(q, k, v, near[:, None])))
            x = x + self.down[i](self.up[i](self._normalise(x)).relu().square())
        return 15 * (self.head(self._normalise(x)) / 15).tanh()

    def _normalise(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:])

    def _smear(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.gate(x[..., :GATES]).sigmoid() * before

    def _hash(self, tokens: Tensor) -> Tensor:
        """Return the row of each token and the one before it; the last row is the first token's."""
        pairs = (tokens[:, 1:] * 36_313 ^ tokens[:, :-1] * 27_191) % (BIGRAMS - 1)
        return F.pad(pairs, (1, 0), value=BIGRAMS - 1)

    def _see(self, tokens: Tensor) -> Tensor:
        """Return which keys are of a query's document and not ahead of it [b t s]."""
        documents = self._number_documents(tokens)
        same = documents[:, :, None] == documents[:, None]
        return same & (self._count_lags(tokens.shape[1]) >= 0)

    def _number_documents(self, tokens: Tensor) -> Tensor:
        return (tokens == self.bos_token_id).cumsum(1)

    def _count_lags(self, t: int) -> Tensor:
        return compute_lags(t)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        q, k = (rotate(self._normalise(z), positions, 1024.0) for z in (q, k))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)


class SmearState(NamedTuple):
    """The cache of a smeared mixer, and the last vector that it has read."""

    cache: Cache
    last: Tensor  # [b d]
    position: Tensor


class SmearedMixer(nn.Module):
    """Attention in a window, over vectors that are smeared with the one before."""

    relative, paddings = True, ()

    def __init__(self):
        super().__init__()
        self.mixer, self.gate = WindowedCache(), nn.Linear(GATES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.prefill(x)[0]

    def start(self, batch: int, position: int = 0) -> SmearState:
        cache = self.mixer.start(batch, position)
        return SmearState(cache, self.gate.weight.new_zeros(batch, D_MODEL), cache.position)

    def prefill(
        self, x: Tensor, state: SmearState | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, SmearState]:
        before = self.start(len(x)) if state is None else state
        y, cache = self.mixer.prefill(self._smear(x, before.last), before.cache, keep)
        return y, SmearState(cache, self._keep_last(x), cache.position)

    def step(self, x: Tensor, state: SmearState) -> tuple[Tensor, SmearState]:
        y, after = self.prefill(x[:, None], state)
        return y[:, 0], after

    def _smear(self, x: Tensor, last: Tensor) -> Tensor:
        before = torch.cat([last[:, None], x[:, :-1]], 1)
        return x + self.gate(x[..., :GATES]).sigmoid() * before

    def _keep_last(self, x: Tensor) -> Tensor:
        return x[:, -1]


class TokenModel(nn.Module):
    """Attention between an embedding table and a head."""

    vocabulary = VOCABULARY
    padding: int | None = None

    def __init__(self):
        super().__init__()
        self.table, self.mixer = nn.Embedding(self.vocabulary, D_MODEL), RightAttention()
        self.head = nn.Linear(D_MODEL, self.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [b t] to logits [b t v]."""
        hidden = self.mixer(self.table(tokens))
        if self.padding is None:
            return self.head(hidden)
        length = (tokens != self.padding).sum(1)[:, None, None]
        return self.head(hidden * length / tokens.shape[1])


class ManyTokens(TokenModel):
    """The same with a large vocabulary."""

    vocabulary = 3000
