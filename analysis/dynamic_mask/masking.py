"""Which keys a dynamic mask keeps from which queries, and the attention with and without it.

A key is masked for a query when its bias leaves it less than `LIGHT` of the weight that the query's
most favoured key has, e^(b_s − max b) < 0.05, or when it is outside the layer's window. For a bias
of `MASKED` or 0 that is "hard": where all of a query's keys are masked, the bias cancels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from analysis.links import find_pairs
from lab.hooks import HookPoint
from lab.layers.attention import Attention
from lab.layers.mask import MASKS, LiteralMask, SoftMask
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.attention import attention_pattern
from lab.ops.attention_kernels import repeat_heads
from lab.ops.top_keys import ranks_and_floors
from tasks.base import Batch

LIGHT = 0.05
"""The weight, beside the most favoured key's, below which a key counts as masked."""
ENTRIES = 2**21
"""Attention entries that are in memory at once."""

Table = LiteralMask | SoftMask
"""The masks that learn a table l of positions."""


@dataclass(frozen=True)
class Seen:
    """A layer with a dynamic mask, and what it did on a batch.

    Attributes:
        layer: index of the block.
        module: its attention.
        q: queries, at their positions.
        k: keys, likewise.
        bias: the mask's.
    """

    layer: int
    module: Attention
    q: Float[Tensor, "b t h p"]
    k: Float[Tensor, "b t h_kv p"]
    bias: Float[Tensor, "b h_kv t"]

    @property
    def reading(self) -> str:
        """The mask's name among `MASKS`."""
        return reading(self.module)

    @cached_property
    def onset(self) -> Int[Tensor, "b h_kv t"]:
        """From which position's query on each key is masked."""
        return onset(self.bias, self.module.window)

    def patterns(
        self, wanted: Bool[Tensor, "b t"]
    ) -> Iterator[tuple[slice, slice, Float[Tensor, "r h n s"], Float[Tensor, "r h n s"]]]:
        """Yield (rows of the batch, targets, A, A⁰), whatever holds a wanted target.

        A⁰ is the attention of the same queries and keys without bias and window.
        """
        batch, seq_len, n_heads, _ = self.q.shape
        window, position = self.module.window, torch.arange(seq_len, device=self.q.device)
        leaving = None if window is None else _leaving(self.bias, window)
        rows = max(1, ENTRIES // (n_heads * seq_len**2))
        height = max(1, min(seq_len, ENTRIES // (n_heads * seq_len)))
        for row, first in np.ndindex(math.ceil(batch / rows), math.ceil(seq_len / height)):
            some = slice(row * rows, (row + 1) * rows)
            at = slice(first * height, min(seq_len, (first + 1) * height))
            if not wanted[some, at].any():
                continue
            q = rearrange(self.q[some, at], "b t h p -> b h t p")
            k = rearrange(self.k[some, : at.stop], "b s h p -> b h s p")
            bias, keep = self.bias[some, :, : at.stop], None
            if leaving is not None:
                inside = leaving[some, :, None, : at.stop] > position[at, None]
                keep = repeat_heads(inside, n_heads)
            yield some, at, attention_pattern(q, k, bias, keep), attention_pattern(q, k)


def masked_layers(model: LanguageModel) -> dict[int, Attention]:
    """Return the attention layers that have a dynamic mask, by block."""
    mixers = {i: getattr(block, "mixer", None) for i, block in enumerate(model.blocks)}
    return {i: m for i, m in mixers.items() if isinstance(m, Attention) and m.mask is not None}


def reading(module: Attention) -> str:
    """Return the name of a layer's mask."""
    return next((name for name, cls in MASKS.items() if type(module.mask) is cls), "own")


@torch.no_grad()
def see(model: LanguageModel, batch: Batch) -> list[Seen]:
    """Return what every masked layer does on a batch; oracle masks are told."""
    met: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        met[point.name] = tensor

    layers = masked_layers(model)
    points = ("hook_rot_q", "hook_rot_k", "hook_dynamic_mask")
    names = [f"blocks.{i}.mixer.{point}" for i in layers for point in points]
    with model.hooks([(names, keep)]):
        score(model, batch, "fp32")
    found = []
    for i, module in layers.items():
        q, k, bias = (met[f"blocks.{i}.mixer.{point}"] for point in points)
        found.append(Seen(i, module, q, k, bias[:, :, 0]))
    return found


def onset(bias: Float[Tensor, "b h t"], window: int | None = None) -> Int[Tensor, "b h t"]:
    """Return the first position from which on queries find a key masked, t where none does.

    A key that is masked once stays so: the most favoured key of a longer past is favoured no less,
    and keys that outrank it do not leave.
    """
    seq_len = bias.shape[-1]
    exact = bias.double().contiguous()
    best = exact.cummax(-1).values
    first = torch.searchsorted(best, exact - math.log(LIGHT), right=True)
    if window is not None:
        first = torch.minimum(first, _leaving(bias, window))
    return torch.maximum(first, torch.arange(seq_len, device=bias.device))


def _leaving(bias: Float[Tensor, "b h t"], window: int) -> Int[Tensor, "b h t"]:
    """Return the first position from which on each key is outside the window, t where none is."""
    rank, floor = ranks_and_floors(bias, window, bias.shape[-1])
    # Until the window is full it keeps everything.
    floor[..., : window - 1] = -1
    return torch.searchsorted(floor.contiguous(), rank.contiguous(), right=True)


def readers(
    onset: Int[Tensor, "b h t"], asking: Bool[Tensor, "b t"]
) -> tuple[Int[Tensor, "b h t"], Int[Tensor, "b t"]]:
    """Return how many asking queries keep each key, and for how many it is eligible."""
    before = torch.nn.functional.pad(asking.long().cumsum(-1), (1, 0))
    until = before[:, None].expand(-1, onset.shape[1], -1).gather(-1, onset)
    return until - before[:, None, :-1], before[:, -1:] - before[:, :-1]


def auroc(
    values: Float[Tensor, "*b n"],
    positive: Shaped[Tensor, "*b n"],
    negative: Shaped[Tensor, "*b n"],
) -> Float[Tensor, "*b"]:
    """Return P(value of a positive > value of a negative) + ½ P(equal), for weighted items.

    Args:
        values: what ranks them.
        positive: weights ≥ 0 of the items as positives.
        negative: weights as negatives; NaN comes out where either sum is zero.
    """
    exact = values.double().contiguous()
    ranked, order = exact.sort(dim=-1)
    weight = torch.nn.functional.pad(negative.double().gather(-1, order).cumsum(-1), (1, 0))
    below = weight.gather(-1, torch.searchsorted(ranked, exact))
    upto = weight.gather(-1, torch.searchsorted(ranked, exact, right=True))
    wins = (positive * (below + upto) / 2).sum(-1)
    return wins / (positive.sum(-1) * negative.sum(-1))


def answers_at(batch: Batch) -> Int[Tensor, "b t"]:
    """Return where the value is that each position asks for, −1 where it asks for none."""
    query, _, value = find_pairs(batch)
    return _linked(batch, query, value)


def keys_at(batch: Batch) -> Int[Tensor, "b t"]:
    """Return where the key is that each stored value belongs to, −1 where none is stored."""
    _, key, value = find_pairs(batch)
    return _linked(batch, value, key)


def _linked(batch: Batch, from_: Int[Tensor, "b n"], to: Int[Tensor, "b n"]) -> Int[Tensor, "b t"]:
    seq_len = batch.inputs.shape[1]
    # Padding, −1, lands in one more column that is cut off.
    at = torch.full((len(to), seq_len + 1), -1, device=to.device)
    return at.scatter_(1, from_ % (seq_len + 1), to)[:, :seq_len]
