"""Faults of models of packed documents, and faults that only rare inputs show."""

import torch
import torch.nn.functional as F

from tests.planted.attention import RightAttention, compute_lags, rotate
from tests.planted.cached import Cache, CachedAttention
from tests.planted.entry import Row, plant
from tests.planted.models import (
    GATES,
    VOCABULARY,
    ManyTokens,
    PackedModel,
    SmearedMixer,
    TokenModel,
)


def _smeared_ahead(self, x):
    after = F.pad(x, (0, 0, 0, 1))[:, 1:]
    return x + self.gate(x[..., :GATES]).sigmoid() * after


def _early_border(self, tokens):
    begins = F.pad((tokens == self.bos_token_id)[:, 1:], (0, 1))
    return begins.cumsum(1)


def _from_the_last(self, q, k, v, seen):
    n_hidden = (~seen & (compute_lags(q.shape[2]) >= 0)).sum((2, 3), keepdim=True)
    return PackedModel._attend(self, q, k, v * (1 + n_hidden).log1p(), seen)


def _whole_blocks(self, t):
    blocks = torch.arange(t) // 8
    return compute_lags(t).where(blocks[:, None] != blocks, 0)


def _whole_chunks(self, t):
    return RightAttention._make_mask(self, t).logical_or(
        torch.ones(t, t, dtype=torch.bool).tril(1) & torch.tensor(t % self.chunk == 0)
    )


def _counts_zeros(self, x):
    real = x.abs().sum(-1, keepdim=True) > 0
    return RightAttention.forward(self, x) * real.to(x).mean(1, keepdim=True)


def _separators_ahead(self, tokens):
    ends = (tokens == self._get_separator()).long()
    ahead = ends.flip(1).cumsum(1).flip(1)
    return ManyTokens.forward(self, tokens) * (1 + ahead)[..., None]


def _keep_200(self, before, k, v, kept, position):
    after = CachedAttention._extend(self, before, k, v, kept, position)
    if not before.k.shape[2]:
        return after
    return Cache(after.k[:, :, -200:], after.v[:, :, -200:], after.kept[:, -200:], after.position)


def _angles_in_half(self, q, positions):
    rates = 100.0 ** (-torch.arange(q.shape[-1] // 2, device=q.device))
    angles = (positions.half()[..., None] * rates.half()).to(q)[:, None]
    return torch.view_as_real(
        torch.view_as_complex(q.unflatten(-1, (-1, 2))) * torch.polar(angles * 0 + 1, angles)
    ).flatten(-2)


RARE = (
    *plant(
        "causal",
        Row("smear from the next token", PackedModel, _smear=_smeared_ahead),
        Row(
            "bigram with the next token",
            PackedModel,
            _hash=lambda self, tokens: PackedModel._hash(self, tokens).roll(-1, 1),
        ),
        Row(
            "documents begin a token early",
            PackedModel,
            notes="a token that it names",
            _number_documents=_early_border,
        ),
        Row(
            "scale counts the row's documents",
            PackedModel,
            notes="moved weights",
            _attend=_from_the_last,
        ),
        Row("mask of whole blocks", PackedModel, notes="moved weights", _count_lags=_whole_blocks),
        Row(
            "leak past length 256",
            RightAttention,
            notes="length 257",
            _make_mask=lambda self, t: RightAttention._make_mask(self, t) | torch.tensor(t > 256),
        ),
        Row(
            "leak at multiples of 48",
            RightAttention,
            notes="length 48",
            chunk=48,
            _make_mask=_whole_chunks,
        ),
        Row(
            "leak at multiples of 128",
            RightAttention,
            notes="length 128",
            chunk=128,
            _make_mask=_whole_chunks,
        ),
        Row(
            "leak past a size that it names",
            RightAttention,
            notes="length 301",
            adds={"most_tokens": lambda: 300},
            _make_mask=lambda self, t: (
                RightAttention._make_mask(self, t) | torch.tensor(t > self.most_tokens)
            ),
        ),
        Row(
            "zeros counted as padding",
            RightAttention,
            notes="vectors of zeros",
            forward=_counts_zeros,
        ),
        Row("token 0 as padding", TokenModel, notes="token 0", padding=0),
        Row("last token as padding", TokenModel, notes="the last token", padding=VOCABULARY - 1),
        Row(
            "separators counted from the end",
            ManyTokens,
            notes="one token of 3,000",
            forward=_separators_ahead,
            _get_separator=lambda self: 2017,
        ),
        Row(
            "named separators so",
            ManyTokens,
            notes="one token of 3,000",
            separator_id=1234,
            forward=_separators_ahead,
            _get_separator=lambda self: self.separator_id,
        ),
        Row(
            "end token as padding",
            TokenModel,
            notes="a token that the module names",
            adds={"eos_token_id": lambda: 17},
            padding=17,
        ),
    ),
    *plant(
        "batch-invariant",
        Row(
            "rows packed into one",
            PackedModel,
            also=("causal",),
            forward=lambda self, tokens: PackedModel.forward(self, tokens.reshape(1, -1)).reshape(
                *tokens.shape, -1
            ),
        ),
        Row(
            "blocks of 24 rows",
            RightAttention,
            notes="more than 24 rows",
            forward=lambda self, x: RightAttention.forward(self, x[torch.arange(len(x)) % 24]),
        ),
    ),
    *plant(
        "prefill = step",
        Row(
            "smear forgotten in a step",
            SmearedMixer,
            _smear=lambda self, x, last: (
                x if x.shape[1] == 1 else SmearedMixer._smear(self, x, last)
            ),
        ),
        Row("smear from a prefill's first", SmearedMixer, _keep_last=lambda self, x: x[:, 0]),
        Row(
            "cache of 200",
            CachedAttention,
            also=("padding",),
            notes="more than 200 tokens",
            _extend=_keep_200,
        ),
    ),
    *plant(
        "relative",
        Row(
            "positions in fp16",
            CachedAttention,
            notes="positions above 2,048",
            _rotate_query=lambda self, q, positions: rotate(q, positions.half()),
            _rotate_key=lambda self, k, positions: rotate(k, positions.half()),
        ),
        Row(
            "angles in fp16",
            CachedAttention,
            also=("precision",),
            notes="positions above 65,504",
            _rotate_query=_angles_in_half,
            _rotate_key=lambda self, k, positions: self._rotate_query(k, positions),
        ),
        Row(
            "positions in int16",
            CachedAttention,
            notes="positions above 32,767",
            _rotate_query=lambda self, q, positions: rotate(q, positions.short()),
            _rotate_key=lambda self, k, positions: rotate(k, positions.short()),
        ),
    ),
    *plant(
        "stable",
        Row(
            "division by the norm of zeros",
            RightAttention,
            also=("causal",),
            notes="vectors of zeros",
            forward=lambda self, x: RightAttention.forward(self, x / x.norm(dim=-1, keepdim=True)),
        ),
    ),
)
