"""Causal softmax attention with a bias for each key: the fast form, and the explicit one beside it.

A bias that depends on the key alone is one more product in q·k, so a kernel that knows nothing
of biases computes it: with q' = [q, 1] and k' = [k, b/scale], scale·(q'·k') = scale·(q·k) + b.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

MASKED = -1024.0
"""The bias of a masked key.

Low enough that exp gives exactly 0: fp32 underflows below -104 and fp64 below -746, so a masked
key weighs nothing while scores differ by less than 900 (fp64: 270). Finite, so that where every
eligible key is masked the bias cancels in the softmax and the row is plain causal attention, not
NaN (erratum D3). Small enough that its rounding moves such a row's scores by 2^-14 in fp32 only,
and that b/scale stays inside fp16 for heads up to 4,095 wide.
"""


def causal_keep(n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "t s"]:
    """Return which keys each query may read; the last query stands at the last key.

    Raises:
        ValueError: when there are more queries than keys.

    Source: lst:dynamic_mask. Departs: with one query and many keys the listing shows key 0 alone
        (erratum D3); here the diagonal is offset by s - t.
    """
    if n_queries > n_keys:
        raise ValueError(f"n_queries={n_queries} must be at most n_keys={n_keys}")
    every = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    return every.tril(n_keys - n_queries)


def top_keys(
    key_bias: Float[Tensor, "b h s"], window: int, n_queries: int
) -> Bool[Tensor, "b h t s"]:
    """Return, for each query, the `window` keys of highest bias among those it may read.

    Key s stays for query t when fewer than `window` keys s' ≤ t outrank it. Of equal biases the
    later key outranks, so a constant bias gives sliding-window attention. Quadratic in memory.

    Departs: the authors' later code ranks all keys at once, so a later key can push out an
        earlier one that an earlier query needs; here every query ranks its own past.
    """
    n_keys = key_bias.shape[-1]
    contender, key = key_bias[..., :, None], key_bias[..., None, :]
    position = torch.arange(n_keys, device=key_bias.device)
    outranks = (contender > key) | ((contender == key) & (position[:, None] > position))
    rank = outranks.cumsum(-2, dtype=torch.int32)[..., n_keys - n_queries :, :]
    return causal_keep(n_queries, n_keys, key_bias.device) & (rank < window)


def attend(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h s p"],
    v: Float[Tensor, "b h s p_v"],
    key_bias: Float[Tensor, "b h s"] | None = None,
    window: int | None = None,
) -> Float[Tensor, "b h t p_v"]:
    """Return softmax(q·k/√p + key_bias) v over the causal keys, by a fused kernel.

    Args:
        q: queries; with fewer queries than keys the last query stands at the last key.
        k: keys.
        v: values, of any width.
        key_bias: added to every score of a key; `MASKED` removes it.
        window: keep for each query only the keys that `top_keys` names.

    Raises:
        ValueError: for a window without a bias to rank by, or more queries than keys.

    Source: sec:methods:ifa. Departs: masks before the softmax, so rows sum to one (erratum D2).
    """
    (n_queries, d_head), n_keys, d_value = q.shape[-2:], k.shape[-2], v.shape[-1]
    keep = None
    if window is not None:
        if key_bias is None:
            raise ValueError(f"window={window} needs key_bias: no key outranks another without it")
        keep = top_keys(key_bias, window, n_queries)
    elif n_queries != n_keys:
        keep = causal_keep(n_queries, n_keys, q.device)
    scale = d_head**-0.5
    if key_bias is not None:
        q, k = _fold(q, k, key_bias / scale)
    # The kernels want one width for q, k and v; CUDA's want whole 16 bytes.
    width = d_head
    if key_bias is not None or d_value != d_head:
        width = -(-max(q.shape[-1], d_value) // 8) * 8
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=keep is None, scale=scale)
    return z[..., :d_value]


def _fold(
    q: Float[Tensor, "b h t p"], k: Float[Tensor, "b h s p"], bias: Float[Tensor, "b h s"]
) -> tuple[Tensor, Tensor]:
    """Return q and k two columns wider, so that q·k grows by the key's bias.

    The bias is cut into what bf16 holds and the rest: the sum is exact in fp32 and fp64, and
    keeps 16 bits in bf16, also where autocast turns fp32 inputs into bf16 inside the kernel.
    """
    high = bias.detach().bfloat16().to(bias.dtype)
    columns = torch.stack([high, bias - high], dim=-1).to(k.dtype)
    ones = q.new_ones(*q.shape[:-1], 2)
    return torch.cat([q, ones], dim=-1), torch.cat([k, columns], dim=-1)


def attention_scores(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h s p"],
    key_bias: Float[Tensor, "b h s"] | None = None,
    keep: Bool[Tensor, "... t s"] | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return q·k/√p + key_bias, and -∞ where a query may not read; at least fp32.

    A query reads the causal keys that `keep` marks; if it marks none of them, all of them
    (erratum D3: an empty row would be NaN after the softmax).
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(precise) @ k.to(precise).mT) * q.shape[-1] ** -0.5
    if key_bias is not None:
        scores = scores + key_bias[..., None, :]
    eligible = causal = causal_keep(q.shape[-2], k.shape[-2], q.device)
    if keep is not None:
        eligible = causal & keep
        eligible = eligible | (causal & ~eligible.any(dim=-1, keepdim=True))
    return scores.masked_fill(~eligible, -torch.inf)


def attention_pattern(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h s p"],
    key_bias: Float[Tensor, "b h s"] | None = None,
    keep: Bool[Tensor, "... t s"] | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return the attention matrix, the softmax of `attention_scores`: the oracle of `attend`."""
    return attention_scores(q, k, key_bias, keep).softmax(dim=-1).to(q.dtype)
