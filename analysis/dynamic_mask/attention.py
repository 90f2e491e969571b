"""Sums over queries and keys: the attention that a mask moves, and the share of keys it keeps."""

import numpy as np
import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from analysis.dynamic_mask.layers import MaskedLayer
from lab.ops.attention_kernels import repeat_heads


def sum_attention(
    layer: MaskedLayer,
    asking: Bool[Tensor, "b t"],
    stored: Bool[Tensor, "b t"] | None,
    edges: dict[str, tuple[Int[Tensor, "b t"], Bool[Tensor, "b t"]]],
) -> dict[str, Float[Tensor, "b h_kv"]]:
    """Sum over the queries of each row, by key head, what the mask removes, moves and leaves.

    Args:
        layer: a masked layer on a batch.
        asking: the scored queries.
        stored: the keys that belong to pairs; None for a task without pairs.
        edges: by name, the key that each position should read, and the positions that count.

    Returns:
        `lost`, A⁰ on masked keys; `moved`, ½ Σ|A − A⁰|; with pairs also `lost_unstored` and
        `free_unstored`, A⁰ on the other keys, masked or all. For each edge its name alone for A,
        and with the prefix `free_` for A⁰, `lost_` for A⁰ where masked, `hidden_` for how often it
        is masked, and `uniform_` for even attention.
    """
    n_heads, n_kv_heads = layer.module.n_heads, layer.module.n_kv_heads
    sums: dict[str, Tensor] = {}
    position = torch.arange(asking.shape[1], device=asking.device)
    wanted = torch.stack([asking, *(targets for _, targets in edges.values())]).any(0)
    for some, at, pattern, free in layer.iterate_patterns(wanted):
        masked = repeat_heads(layer.onset[some, :, None, : at.stop] <= position[at, None], n_heads)
        lost = free * masked
        parts = {"lost": lost.sum(-1), "moved": (pattern - free).abs().sum(-1) / 2}
        if stored is not None:
            unstored = ~stored[some, None, None, : at.stop]
            parts["lost_unstored"] = (lost * unstored).sum(-1)
            parts["free_unstored"] = (free * unstored).sum(-1)
        counted = dict.fromkeys(parts, asking)
        for name, (source, targets) in edges.items():
            place = source[some, None, at, None].clamp(min=0).expand(*free.shape[:3], 1)
            on = {"": pattern, "free_": free, "lost_": lost, "hidden_": masked.to(free.dtype)}
            on["uniform_"] = (free > -1) / (position[at, None] + 1.0)
            parts |= {what + name: edge.gather(-1, place)[..., 0] for what, edge in on.items()}
            counted |= {what + name: targets for what in on}
        for name, part in parts.items():
            total = (part * counted[name][some, None, at]).double().sum(-1)
            known = sums.setdefault(name, total.new_zeros(len(asking), n_kv_heads))
            known[some] += reduce(total, "b (h g) -> b h", "mean", h=n_kv_heads)
    return sums


def sum_weights(bias: Float[Tensor, "b h t"]) -> Float[Tensor, "b h t"]:
    """Sum e^(b_s − max b), a key's weight relative to the most favoured, over its queries."""
    bias = bias.double()
    best = bias.cummax(-1).values
    later = (-best).flip(-1).logcumsumexp(-1).flip(-1)
    return (bias + later).exp()


def average_by_role_and_band(
    part: Shaped[Tensor, "b h t"],
    whole: Int[Tensor, "b t"],
    roles: Int[Tensor, "b t"],
    n_roles: int,
    n_bands: int,
) -> Float[np.ndarray, "h roles bands"]:
    """Return Σ part / Σ whole over the keys of each role and band of positions; NaN where none."""
    n_heads, seq_len = part.shape[1:]
    band = torch.arange(seq_len, device=part.device) * n_bands // seq_len
    group = roles * n_bands + band
    counts = torch.cat([part.double(), whole[:, None].double()], 1)
    sums = counts.new_zeros(n_heads + 1, n_roles * n_bands)
    sums.index_add_(1, group.flatten(), rearrange(counts, "b h t -> h (b t)"))
    table = rearrange(sums, "h (r n) -> h r n", n=n_bands).cpu().numpy()
    with np.errstate(invalid="ignore"):
        return table[:-1] / table[-1:]
