"""Which keys a dynamic mask hides from which queries.

A key is masked for a query if its bias leaves it less than `LIGHT` of the weight of the query's
most favoured key, e^(b_s − max b) < 0.05, or if it is outside the layer's window. If all of a
query's keys have the same bias, as when all are `MASKED`, it cancels and none is masked by it.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lab.ops.top_keys import ranks_and_floors

LIGHT = 0.05
"""The weight, relative to the most favoured key's, below which a key counts as masked."""


def find_onsets(bias: Float[Tensor, "b h t"], window: int | None = None) -> Int[Tensor, "b h t"]:
    """Return the first position from which on queries find each key masked; t where none does.

    A masked key stays masked: later queries have the same keys and more, so that the most favoured
    one is favoured no less, and the keys that outrank this one stay.
    """
    seq_len = bias.shape[-1]
    exact = bias.double().contiguous()
    best = exact.cummax(-1).values
    first = torch.searchsorted(best, exact - math.log(LIGHT), right=True)
    if window is not None:
        first = torch.minimum(first, find_window_exits(bias, window))
    return torch.maximum(first, torch.arange(seq_len, device=bias.device))


def find_window_exits(bias: Float[Tensor, "b h t"], window: int) -> Int[Tensor, "b h t"]:
    """Return the first position from which on each key is outside the window; t where none is."""
    rank, floor = ranks_and_floors(bias, window, bias.shape[-1])
    # Until the window is full it keeps every key.
    floor[..., : window - 1] = -1
    return torch.searchsorted(floor.contiguous(), rank.contiguous(), right=True)


def count_readers(
    onset: Int[Tensor, "b h t"], asking: Bool[Tensor, "b t"]
) -> tuple[Int[Tensor, "b h t"], Int[Tensor, "b t"]]:
    """Return for how many of the asking queries each key is kept, and for how many it is eligible.

    A key is eligible for the queries at its own position and later.
    """
    before = torch.nn.functional.pad(asking.long().cumsum(-1), (1, 0))
    until = before[:, None].expand(-1, onset.shape[1], -1).gather(-1, onset)
    return until - before[:, None, :-1], before[:, -1:] - before[:, :-1]
