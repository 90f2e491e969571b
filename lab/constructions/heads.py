"""What the hand-set heads of attention share: values that carry channels, and scores."""

import math

import torch
from torch import nn

from lab.constructions.cannot import CannotError
from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mask import LiteralMask, SoftMask

LEAD = 7.0
"""Nats by which the right key leads all others together: they weigh e^−7 = .001 at most."""
LARGEST_SCORE = 8000.0
"""A larger one rounds by more than .001 in fp32, and wants weights out of proportion."""


def count_room(attention: Attention) -> int:
    """Return how many channels a layer's values carry at most."""
    if isinstance(attention.v, nn.Linear):
        return attention.v.out_features
    return attention.out.in_features


@torch.no_grad()
def carry(attention: Attention, source: slice, into: slice, amount: float) -> list[int]:
    """Let values be the channels `source`, put out into others; return the query heads that do.

    Values of inner functions are made alike: all rows equal, so that it does not matter which
    a token retrieves.
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
    # A value channel belongs to a head of keys, which the first of its query heads reads.
    share = attention.n_heads // attention.n_kv_heads
    width = attention.out.in_features // attention.n_heads
    columns = [place // width * share * width + place % width for place in places]
    attention.out.weight[targets, columns] = amount
    return sorted({column // width for column in columns})


def _make_alike(attention: InnerFunctionAttention) -> None:
    n_values, k = len(attention.value_rows), attention.n_chosen
    # Nearly equal scores, so that the weights are known; not zero, so that keys get gradient.
    attention.value_query.weight.mul_(0.01)
    total = {"softmax": k / n_values, "sigmoid": k / 2}.get(attention.retrieval, k)
    attention.value_rows.fill_(1 / total)


@torch.no_grad()
def clear(attention: Attention, heads: list[int]) -> None:
    """Zero the queries and keys of some query heads, to be written anew."""
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
    """Add a product to the scores: a channel of the query's stream times one of the key's.

    Args:
        attention: whose weights are set.
        heads: query heads.
        place: channel of the head in which the two meet.
        query: channel of the stream that the query reads, and its weight.
        key: likewise the key's.
    """
    width = attention.q.out_features // attention.n_heads
    share = attention.n_heads // attention.n_kv_heads
    for head in heads:
        attention.q.weight[head * width + place, query[0]] = query[1]
        attention.k.weight[head // share * width + place, key[0]] = key[1]


def find_needed_score(margin: float, seq_len: int, what: str, hint: str = "") -> float:
    """Return the scale at which scores that differ by `margin` leave the right key alone.

    Raises:
        CannotError: where fp32 or the weights would not bear it.
    """
    lead = math.log(seq_len) + LEAD
    if margin <= 0 or lead / margin > LARGEST_SCORE:
        raise CannotError(
            f"{what}: the right key leads by {max(margin, 0):.2g} of a score's scale, and over "
            f"seq_len={seq_len} keys must by {lead:.3g}; scores above {LARGEST_SCORE:g} "
            f"are refused{hint}"
        )
    return lead / margin


def check_open(attention: Attention, seq_len: int) -> None:
    """Hold a mask to hiding nothing that is wanted: it stays as built, its table ones or A zero.

    An oracle mask keeps what is wanted, which scores highest among all keys anyhow.

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
            f"{seq_len - attention.window} of {seq_len}; window={seq_len} or none would do"
        )
