"""Faults that only rare inputs show: long ones, many rows, zeros, special tokens, far positions."""

import torch
from torch import Tensor, nn

from tests.planted.attention import D_MODEL, RightAttention, rotate
from tests.planted.cached import Cache, CachedAttention
from tests.planted.entry import Fault

VOCABULARY = 40


class _PastTable(RightAttention):
    """Past 256 tokens the mask is left out."""

    def _make_mask(self, t: int) -> Tensor:
        return super()._make_mask(t) | torch.tensor(t > 256)


class _WholeChunks(RightAttention):
    """Where chunks fit the length exactly, the last token's weights reach one key ahead."""

    chunk = 48

    def _make_mask(self, t: int) -> Tensor:
        return (
            super()
            ._make_mask(t)
            .logical_or(
                torch.ones(t, t, dtype=torch.bool).tril(1) & torch.tensor(t % self.chunk == 0)
            )
        )


class _WholeChunksOf128(_WholeChunks):
    """The same with chunks of 128."""

    chunk = 128


class _NamedSize(RightAttention):
    """Past a size that only an attribute names, the mask is left out."""

    def __init__(self):
        super().__init__()
        self.most_tokens = 300

    def _make_mask(self, t: int) -> Tensor:
        return super()._make_mask(t) | torch.tensor(t > self.most_tokens)


class _CacheOf200(CachedAttention):
    """The cache keeps the last 200 tokens, which forward does not know."""

    def _extend(self, before: Cache, k: Tensor, v: Tensor, kept: Tensor, position: Tensor) -> Cache:
        after = super()._extend(before, k, v, kept, position)
        if not before.k.shape[2]:
            return after
        return Cache(
            after.k[:, :, -200:], after.v[:, :, -200:], after.kept[:, -200:], after.position
        )


class _BlockOfRows(RightAttention):
    """Rows are computed in blocks of 24, and later blocks repeat the first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[torch.arange(len(x)) % 24])


class _CountsZeros(RightAttention):
    """Outputs are scaled by the share of vectors that are not zero, as if those were padding."""

    def forward(self, x: Tensor) -> Tensor:
        real = x.abs().sum(-1, keepdim=True) > 0
        return super().forward(x) * real.to(x).mean(1, keepdim=True)


class _DividedByNorm(RightAttention):
    """Inputs are divided by their norm, with nothing added to it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.norm(dim=-1, keepdim=True))


class _PositionsInHalf(CachedAttention):
    """Positions are fp16, which holds whole numbers up to 2,048."""

    def _rotate_query(self, q: Tensor, positions: Tensor) -> Tensor:
        return rotate(q, positions.half())

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return rotate(k, positions.half())


class _AnglesInHalf(CachedAttention):
    """Angles are computed in fp16, in which positions above 65,504 are infinite."""

    def _rotate_query(self, q: Tensor, positions: Tensor) -> Tensor:
        rates = 100.0 ** -torch.arange(q.shape[-1] // 2, device=q.device)
        angles = (positions.half()[..., None] * rates.half()).to(q)[:, None]
        return torch.view_as_real(
            torch.view_as_complex(q.unflatten(-1, (-1, 2))) * torch.polar(angles * 0 + 1, angles)
        ).flatten(-2)

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return self._rotate_query(k, positions)


class _PositionsInShort(CachedAttention):
    """Positions are int16, which ends at 32,767."""

    def _rotate_query(self, q: Tensor, positions: Tensor) -> Tensor:
        return rotate(q, positions.short())

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return rotate(k, positions.short())


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


class _ZeroIsPadding(TokenModel):
    """Token 0 is taken for padding, and lengths are counted without it."""

    padding = 0


class _LastIsPadding(TokenModel):
    """The last token is taken for padding."""

    padding = VOCABULARY - 1


class _NamedEnd(TokenModel):
    """The end token that the module names is taken for padding."""

    padding = 17

    def __init__(self):
        super().__init__()
        self.eos_token_id = 17


class ManyTokens(TokenModel):
    """The same with a large vocabulary."""

    vocabulary = 3000


class _SeparatorsAhead(ManyTokens):
    """Logits are scaled by the number of separators from their position to the end of the row."""

    def forward(self, tokens: Tensor) -> Tensor:
        ends = (tokens == self._get_separator()).long()
        ahead = ends.flip(1).cumsum(1).flip(1)
        return super().forward(tokens) * (1 + ahead)[..., None]

    def _get_separator(self) -> int:
        return 2017


class _NamedSeparatorAhead(_SeparatorsAhead):
    """The same with a separator that the module names."""

    separator_id = 1234

    def _get_separator(self) -> int:
        return self.separator_id


class SilentZeros(RightAttention):
    """A vector of zeros has no output of its own, as padding might; that is causal."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        return super().forward(x) * (x.abs().sum(-1, keepdim=True) > 0)


RARE = (
    Fault("leak past length 256", "causal", _PastTable, notes="length 257"),
    Fault("leak at multiples of 48", "causal", _WholeChunks, notes="length 48"),
    Fault("leak at multiples of 128", "causal", _WholeChunksOf128, notes="length 128"),
    Fault("leak past a size that it names", "causal", _NamedSize, notes="length 301"),
    Fault("zeros counted as padding", "causal", _CountsZeros, notes="vectors of zeros"),
    Fault("token 0 as padding", "causal", _ZeroIsPadding, notes="token 0"),
    Fault("last token as padding", "causal", _LastIsPadding, notes="the last token"),
    Fault(
        "separators counted from the end", "causal", _SeparatorsAhead, notes="one token of 3,000"
    ),
    Fault("named separators so", "causal", _NamedSeparatorAhead, notes="one token of 3,000"),
    Fault("end token as padding", "causal", _NamedEnd, notes="a token that the module names"),
    Fault("blocks of 24 rows", "batch-invariant", _BlockOfRows, notes="more than 24 rows"),
    Fault(
        "cache of 200", "prefill = step", _CacheOf200, ("padding",), notes="more than 200 tokens"
    ),
    Fault("positions in fp16", "relative", _PositionsInHalf, notes="positions above 2,048"),
    Fault("angles in fp16", "relative", _AnglesInHalf, ("precision",), "positions above 65,504"),
    Fault("positions in int16", "relative", _PositionsInShort, notes="positions above 32,767"),
    Fault(
        "division by the norm of zeros", "stable", _DividedByNorm, ("causal",), "vectors of zeros"
    ),
)
