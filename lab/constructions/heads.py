"""Setting the weights of attention heads: values that carry channels, and scores."""

import math

import torch
from torch import nn

from lab.constructions.cannot import CannotError
from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mask import LiteralMask, SoftMask

LEAD = 7.0
"""Nats by which the right key leads all others together, so they weigh at most e^−7 = .001."""
LARGEST_SCORE = 8000.0
"""A larger score rounds by more than .001 in fp32, and needs very large weights."""


def count_room(attention: Attention) -> int:
    """Return the most channels that a layer's values can carry."""
    if isinstance(attention.v, nn.Linear):
        return attention.v.out_features
    return attention.out.in_features


@torch.no_grad()
def carry(attention: Attention, source: slice, into: slice, amount: float) -> list[int]:
    """Make the values the channels `source`, output into `into`; return the query heads that do so.

    All value rows of an inner function become equal, so that it does not matter which ones a token
    retrieves.
    """
    channels = list(range(source.start, source.stop))
    targets = list(range(into.start, into.stop))
    if isinstance(attention.v, nn.Linear):
        places = list(range(len(channels)))
        attention.v.weight[places] = 0
        attention.v.weight[places, channels] = 1
    else:
        places = channels
    if isinstance(attention, InnerFunctionAttention):
        _make_alike(attention)
    # A value channel belongs to a key head; the first of its query heads reads it.
    share = attention.n_heads // attention.n_kv_heads
    width = attention.out.in_features // attention.n_heads
    columns = [place // width * share * width + place % width for place in places]
    attention.out.weight[targets, columns] = amount
    return sorted({column // width for column in columns})


def _make_alike(attention: InnerFunctionAttention) -> None:
    n_values, k = len(attention.value_rows), attention.n_chosen
    # Nearly equal scores give known weights; zero would give keys no gradient.
    attention.value_query.weight.mul_(0.01)
    total = {"softmax": k / n_values, "sigmoid": k / 2}.get(attention.retrieval, k)
    attention.value_rows.fill_(1 / total)


@torch.no_grad()
def clear(attention: Attention, heads: list[int]) -> None:
    """Set the queries and keys of some query heads to zero, before scores are added."""
    width = attention.q.out_features // attention.n_heads
    share = attention.n_heads // attention.n_kv_heads
    for head in heads:
        attention.q.weight[head * width : (head + 1) * width] = 0
        key = head // share
        attention.k.weight[key * width : (key + 1) * width] = 0


@torch.no_grad()
def add_score(
    attention: Attention,
    heads: list[int],
    place: int,
    query: tuple[int, float],
    key: tuple[int, float],
) -> None:
    """Add to the scores a product of one channel of the query's stream and one of the key's.

    Args:
        attention: whose weights are set.
        heads: query heads.
        place: channel of the head that holds the two factors.
        query: channel of the stream that the query reads, and its weight.
        key: likewise the key's.
    """
    width = attention.q.out_features // attention.n_heads
    share = attention.n_heads // attention.n_kv_heads
    for head in heads:
        attention.q.weight[head * width + place, query[0]] = query[1]
        attention.k.weight[head // share * width + place, key[0]] = key[1]


def find_needed_score(margin: float, seq_len: int, what: str, hint: str = "") -> float:
    """Return the scale of scores at which the right key, ahead by `margin`, gets all the weight.

    Raises:
        CannotError: when that takes larger scores than `LARGEST_SCORE`.
    """
    lead = math.log(seq_len) + LEAD
    if margin <= 0 or lead / margin > LARGEST_SCORE:
        raise CannotError(
            f"{what}: the right key leads by {max(margin, 0):.2g} of a score's scale, and over "
            f"seq_len={seq_len} keys it must lead by {lead:.3g}; scores above "
            f"{LARGEST_SCORE:g} are refused{hint}"
        )
    return lead / margin


def check_open(attention: Attention, seq_len: int) -> None:
    """Check that a mask hides no key that is needed; its own weights stay as they are initialised.

    `mask=oracle` keeps the keys that are needed, so it never stands in the way.

    Raises:
        CannotError: for a table that is too short, or a window.
    """
    mask = attention.mask
    if isinstance(mask, (LiteralMask, SoftMask)) and mask.l.shape[-1] < seq_len:
        raise CannotError(
            f"max_seq_len={mask.l.shape[-1]}: must be ≥ seq_len={seq_len}", proven=True
        )
    if attention.window is not None and attention.window < seq_len:
        raise CannotError(
            f"window={attention.window}: an open mask ranks keys by position alone and hides "
            f"{seq_len - attention.window} of {seq_len}; window={seq_len} or none would work"
        )
