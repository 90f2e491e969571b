"""Causal softmax attention with a bias for each key: the fast form, and the explicit one beside it.

Axis letters of this file, besides the package's: h heads of queries, h_kv of keys and values; query
head i reads key head i // (h / h_kv).
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lab.ops.attention_kernels import attend_plainly, cpu_flash, flex, fold, repeat_heads
from lab.ops.derivatives import differentiate_twice, needs_plain
from lab.ops.precision import disable_autocast
from lab.ops.top_keys import causal_keep, causal_keep_at, ranks_and_floors, top_keys, top_keys_at
from tasks.bounds import check_choice

MASKED = -1024.0
"""The bias of a masked key.

Low enough that exp gives exactly 0: fp32 underflows below -104 and fp64 below -746, so a masked
key weighs nothing while scores differ by less than 900 (fp64: 270). Finite, so that where every
eligible key is masked the bias cancels in the softmax and the row is plain causal attention, not
NaN (erratum D3). Small enough that its rounding moves such a row's scores by 2^-14 in fp32 only,
and that b/scale stays inside fp16 for heads up to 4,095 wide.
"""

PADDED = 2 * MASKED
"""The bias of padding: as far below a masked key as that is below others, so that a row whose
every real key is masked still reads those alone, and no padding outranks a key in a window."""

Backend = Literal["auto", "sdpa", "flex"]

LARGEST_KEEP = 2**30
"""Bytes of a window's matrix [b h t s] up to which "auto" builds it on a GPU."""


def resolve_attention_backend(backend: str, device: torch.device, keep_bytes: int = 0) -> str:
    """Return the backend that a request means: its own name, or for "auto" the best there.

    "sdpa" is torch's fused kernels, which want a window as a matrix [b h t s]; "flex" is
    flex_attention, compiled, which does not. "auto" is sdpa, but for windows on a GPU whose matrix
    would pass `LARGEST_KEEP`. On a CPU flex has no gradients and no fused kernel without a
    compilation of a minute, so it runs its plain form there when named: the same numbers.

    Raises:
        ValueError: for an unknown name; lists the known. For flex on a device it does not serve.
    """
    check_choice("backend", backend, get_args(Backend))
    if backend == "auto":
        return "flex" if device.type == "cuda" and keep_bytes > LARGEST_KEEP else "sdpa"
    if backend == "flex" and device.type not in ("cpu", "cuda"):
        raise ValueError(f"{backend=} needs CUDA or a CPU, not {device}")
    return backend


def attend(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h_kv s p"],
    v: Float[Tensor, "b h_kv s p_v"],
    key_bias: Float[Tensor, "b h_kv s"] | None = None,
    window: int | None = None,
    backend: Backend = "auto",
    at: Int[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t p_v"]:
    """Return softmax(q·k/√p + key_bias) v over the causal keys, by a fused kernel.

    Args:
        q: queries.
        k: keys; their heads divide the queries'.
        v: values, of any width.
        key_bias: added to every score of a key; `MASKED` removes it.
        window: keep for each query only the keys that `top_keys` names.
        backend: who computes it (`resolve_attention_backend`).
        at: where each query stands among the keys; None: the last query at the last key.

    Raises:
        ValueError: for a window below one or without a bias to rank by, more queries than keys,
            heads that do not divide, gradients asked of flex on a CPU, an unknown backend, or
            flex with `at`.

    Source: sec:methods:ifa. Departs: masks before the softmax, so rows sum to one (erratum D2).
    """
    (n_heads, n_queries, d_head), (n_kv_heads, n_keys) = q.shape[1:], k.shape[1:3]
    if n_heads % n_kv_heads:
        raise ValueError(f"k has {n_kv_heads} heads, which must divide q's {n_heads}")
    if n_queries > n_keys:
        raise ValueError(f"n_queries={n_queries} must be at most n_keys={n_keys}")
    if window is not None and key_bias is None:
        raise ValueError(f"window={window} needs key_bias: no key outranks another without it")
    keep_bytes = 0 if window is None else q.shape[0] * n_heads * n_queries * n_keys
    chosen = resolve_attention_backend(backend, q.device, keep_bytes)
    if chosen == "flex":
        if at is not None:
            raise ValueError(f"{backend=} has no form for queries at some positions: use 'sdpa'")
        floors = None
        if window is not None and key_bias is not None:
            floors = ranks_and_floors(key_bias, window, n_queries)
        return flex(q, k, v, key_bias, floors)
    keep = None
    if window is not None and key_bias is not None:
        if at is None:
            keep = repeat_heads(top_keys(key_bias, window, n_queries), n_heads)
        else:
            keep = repeat_heads(top_keys_at(key_bias, window, at), n_heads)
    elif at is not None:
        keep = causal_keep_at(at, n_keys)
    elif 1 < n_queries < n_keys:
        keep = causal_keep(n_queries, n_keys, q.device)
    scale = d_head**-0.5
    if needs_plain():
        return attend_plainly(q, k, v, key_bias, keep, scale)
    if q.device.type == "cpu" and key_bias is not None and keep is None:
        return cpu_flash(q, k, v, key_bias)
    # With a matrix, CUDA's kernels want as many key heads as there are of queries.
    if keep is not None:
        k, v = repeat_heads(k, n_heads), repeat_heads(v, n_heads)
        key_bias = None if key_bias is None else repeat_heads(key_bias, n_heads)
    if key_bias is not None:
        q, k = fold(q, k, key_bias / scale)
    d_value, width = v.shape[-1], q.shape[-1]
    # The kernels want one width for q, k and v; CUDA's want whole 16 bytes.
    if width != d_head or d_value != d_head:
        width = max(width, d_value)
        width = width if q.device.type == "cpu" else -(-width // 8) * 8
    q, k, v = (_widen(x, width) for x in (q, k, v))
    z = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=keep,
        is_causal=keep is None and n_queries == n_keys,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    differentiate_twice(z, lambda q, k, v: attend_plainly(q, k, v, None, keep, scale), q, k, v)
    return z[..., :d_value]


def _widen(x: Tensor, width: int) -> Tensor:
    """Return x with zeros up to a width; x itself if it has that, which padding would copy."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def attention_scores(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h_kv s p"],
    key_bias: Float[Tensor, "b h_kv s"] | None = None,
    keep: Bool[Tensor, "... t s"] | None = None,
    at: Int[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return q·k/√p + key_bias, and -∞ where a query may not read; at least fp32, autocast or not.

    A query reads the causal keys that `keep` marks; if it marks none of them, all of them
    (erratum D3: an empty row would be NaN after the softmax). `at` is as in `attend`.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    k = repeat_heads(k, q.shape[1])
    with disable_autocast(q):
        scores = (q.to(precise) @ k.to(precise).mT) * q.shape[-1] ** -0.5
    if key_bias is not None:
        scores = scores + repeat_heads(key_bias, q.shape[1])[..., None, :]
    if at is None:
        eligible = causal = causal_keep(q.shape[-2], k.shape[-2], q.device)
    else:
        eligible = causal = causal_keep_at(at, k.shape[-2])
    if keep is not None:
        eligible = causal & keep
        eligible = eligible | (causal & ~eligible.any(dim=-1, keepdim=True))
    return scores.masked_fill(~eligible, -torch.inf)


def attention_pattern(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h_kv s p"],
    key_bias: Float[Tensor, "b h_kv s"] | None = None,
    keep: Bool[Tensor, "... t s"] | None = None,
    at: Int[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return the softmax of `attention_scores`: the reference for `attend`."""
    return attention_scores(q, k, key_bias, keep, at).softmax(dim=-1).to(q.dtype)
