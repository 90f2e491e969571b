"""Attention layers with a dynamic mask: their tensors on a batch, and attention with and without.

A⁰ is the attention of the same queries and keys without the mask's bias and without the window.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from analysis.dynamic_mask.masking import find_onsets, find_window_exits
from lab.hooks import HookPoint
from lab.layers.attention import Attention
from lab.layers.mask import MASKS, LiteralMask, SoftMask
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.attention import attention_pattern
from lab.ops.attention_kernels import repeat_heads
from tasks.base import Batch

ENTRIES = 2**21
"""Attention entries held in memory at once."""

TableMask = LiteralMask | SoftMask
"""The masks that learn a table l with an entry per position."""


@dataclass(frozen=True)
class MaskedLayer:
    """A layer with a dynamic mask, and its tensors on a batch.

    Attributes:
        layer: index of the block.
        module: its attention.
        q: queries, rotated to their positions.
        k: keys, likewise.
        bias: what the mask adds to the scores of each key, nats.
    """

    layer: int
    module: Attention
    q: Float[Tensor, "b t h p"]
    k: Float[Tensor, "b t h_kv p"]
    bias: Float[Tensor, "b h_kv t"]

    @cached_property
    def onset(self) -> Int[Tensor, "b h_kv t"]:
        """The first position whose query, and all later ones, finds each key masked."""
        return find_onsets(self.bias, self.module.window)

    def iterate_patterns(
        self, wanted: Bool[Tensor, "b t"]
    ) -> Iterator[tuple[slice, slice, Float[Tensor, "r h n s"], Float[Tensor, "r h n s"]]]:
        """Yield (rows of the batch, targets, A, A⁰) for every block that has a wanted target."""
        batch, seq_len, n_heads, _ = self.q.shape
        window, position = self.module.window, torch.arange(seq_len, device=self.q.device)
        exits = None if window is None else find_window_exits(self.bias, window)
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
            if exits is not None:
                inside = exits[some, :, None, : at.stop] > position[at, None]
                keep = repeat_heads(inside, n_heads)
            yield some, at, attention_pattern(q, k, bias, keep), attention_pattern(q, k)


def find_masked_layers(model: LanguageModel) -> dict[int, Attention]:
    """Return the attention layers that have a dynamic mask, by block."""
    mixers = {i: getattr(block, "mixer", None) for i, block in enumerate(model.blocks)}
    return {i: m for i, m in mixers.items() if isinstance(m, Attention) and m.mask is not None}


def name_mask(module: Attention) -> str:
    """Return the name of a layer's mask among `MASKS`; "own" if it is not one of the lab's."""
    return next((name for name, cls in MASKS.items() if type(module.mask) is cls), "own")


def name_mask_points(layers: Iterable[int]) -> list[str]:
    """Return the hook points through which the biases of these layers pass."""
    return [f"blocks.{i}.mixer.hook_dynamic_mask" for i in layers]


@torch.no_grad()
def record_masked_layers(model: LanguageModel, batch: Batch) -> list[MaskedLayer]:
    """Run a model on a batch and return its masked layers with their tensors."""
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        seen[point.name] = tensor

    layers = find_masked_layers(model)
    points = ("hook_rot_q", "hook_rot_k", "hook_dynamic_mask")
    names = [f"blocks.{i}.mixer.{point}" for i in layers for point in points]
    with model.hooks([(names, keep)]):
        score(model, batch, "fp32")
    found = []
    for i, module in layers.items():
        q, k, bias = (seen[f"blocks.{i}.mixer.{point}"] for point in points)
        found.append(MaskedLayer(i, module, q, k, bias[:, :, 0]))
    return found


def disable_masks(model: LanguageModel, layers: Iterable[int]) -> AbstractContextManager[nn.Module]:
    """Set the biases of some layers to zero for a `with` block.

    A window, if there is one, then keeps the latest keys.
    """

    def clear(bias: Tensor, point: HookPoint) -> Tensor:
        return torch.zeros_like(bias)

    return model.hooks([(name_mask_points(layers), clear)])
