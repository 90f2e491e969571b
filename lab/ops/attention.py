"""Causal softmax attention with a bias for each key: the fast form, and the explicit one beside it.

A bias that depends on the key alone is one more product in q·k, so any kernel computes it: with
q' = [q, 1] and k' = [k, b/scale], scale·(q'·k') = scale·(q·k) + b. On a CPU torch's flash kernel
also takes the bias as it is, beside the causal mask, but has no gradient for it; there the column
is needed on the way back alone.

Axis letters of this file, besides the package's: h heads of queries, h_kv of keys and values; query
head i reads key head i // (h / h_kv).
"""

import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lab.ops.derivatives import differentiate, differentiate_twice, needs_plain
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

BLOCK = 128
"""Queries, and keys, that flex_attention reads or skips together; its own default."""

WIDE = 128
"""Width of a head beyond which flex_attention pads it to 256 at least; a folded bias adds two."""


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


def repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """Return x [b h_kv …] with each head repeated for the query heads that read it: [b h …]."""
    if x.shape[1] == n_heads:
        return x
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


def fold(
    q: Float[Tensor, "b h t p"], k: Float[Tensor, "b h_kv s p"], bias: Float[Tensor, "b h_kv s"]
) -> tuple[Tensor, Tensor]:
    """Return q and k two columns wider, so that q·k grows by the key's bias.

    The bias is cut into what bf16 holds and the rest: the sum is exact in fp32 and fp64, and
    keeps 16 bits in bf16, also where autocast turns fp32 inputs into bf16 inside the kernel.
    """
    high = bias.detach().bfloat16().to(bias.dtype)
    columns = torch.stack([high, bias - high], dim=-1).to(k.dtype)
    ones = q.new_ones(*q.shape[:-1], 2)
    return torch.cat([q, ones], dim=-1), torch.cat([k, columns], dim=-1)


def attend_plainly(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h_kv s p"],
    v: Float[Tensor, "b h_kv s p_v"],
    bias: Float[Tensor, "b h_kv s"] | None,
    keep: Bool[Tensor, "... t s"] | None,
    scale: float,
) -> Float[Tensor, "b h t p_v"]:
    """Return softmax(scale·q·k + bias) v over the keys that `keep` marks.

    None marks those that the kernels read without a matrix: the causal ones of as many queries as
    keys, and all for a single query.
    """
    if keep is None:
        keep = causal_keep(q.shape[2], k.shape[2], q.device)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = scale * (q @ k.mT)
    if bias is not None:
        scores = scores + _rows(bias, q.shape[1])
    return scores.masked_fill(~keep, -torch.inf).softmax(-1).to(v.dtype) @ v


def cpu_flash(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h_kv s p"],
    v: Float[Tensor, "b h_kv s p_v"],
    key_bias: Float[Tensor, "b h_kv s"],
) -> Float[Tensor, "b h t p_v"]:
    """Return attention with a key bias by torch's CPU kernel, the bias as its mask operand.

    As many queries as keys are causal; a single one reads every key. The bias stays in fp32 at
    least, whatever q's dtype. `F.scaled_dot_product_attention` refuses a mask beside is_causal, and
    a causal matrix costs twice the time, so the kernel that it would call is called here; like it,
    this follows autocast. `lab.bench.attention` has what it costs: at T = 2048 about 1.03 of the
    unmasked call, and with a gradient for the bias, which widens the backward, 1.05 to 1.15.
    """
    (n_queries, d_head), n_keys, d_value = q.shape[-2:], k.shape[-2], v.shape[-1]
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(dtype) if x.dtype == torch.float32 else x for x in (q, k, v))
    if d_head != d_value:
        width = max(d_head, d_value)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    bias = key_bias.to(torch.promote_types(q.dtype, torch.float32))
    causal, scale = n_queries == n_keys, d_head**-0.5
    if bias.requires_grad and torch.is_grad_enabled():
        z = _Biased.apply(q, k, v, bias, causal, scale)
    else:
        z = _kernel(q, k, v, 0.0, causal, attn_mask=_rows(bias, q.shape[1]), scale=scale)[0]
        differentiate_twice(z, lambda q, k, v: attend_plainly(q, k, v, bias, None, scale), q, k, v)
    return z[..., :d_value]


_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _rows(bias: Float[Tensor, "b h_kv s"], n_heads: int) -> Float[Tensor, "b h 1 s"]:
    return repeat_heads(bias, n_heads)[:, :, None]


class _Biased(torch.autograd.Function):
    """The kernel with a gradient for the bias.

    db_s = Σ_t ∂score_ts is what a key's channel gets whose query channel is one: backward appends
    that channel, zero in the keys so that no score moves. Appending it forward too would cost
    more and change nothing.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, causal, scale):  # type: ignore[override]
        rows = _rows(bias, q.shape[1])
        z, log_sums = _kernel(q, k, v, 0.0, causal, attn_mask=rows, scale=scale)
        ctx.save_for_backward(q, k, v, bias, z, log_sums)
        ctx.causal, ctx.scale = causal, scale
        return z

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        q, k, v, bias, z, log_sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (
                *differentiate(
                    lambda q, k, v, bias: attend_plainly(q, k, v, bias, None, ctx.scale),
                    (q, k, v, bias),
                    (grad,),
                ),
                None,
                None,
            )
        p = q.shape[-1]
        # fp32's matrix products pay more for 65 columns than for 72; bf16's do not.
        extra = 1 if q.dtype in (torch.bfloat16, torch.float16) else 8 - p % 8
        grad_q, grad_k, grad_v = _kernel_backward(
            F.pad(grad, (0, extra)),
            F.pad(q, (0, extra), value=1.0),
            *(F.pad(x, (0, extra)) for x in (k, v, z)),
            log_sums,
            0.0,
            ctx.causal,
            attn_mask=_rows(bias, q.shape[1]),
            scale=ctx.scale,
        )
        grad_bias = grad_k[..., p].to(bias.dtype) / ctx.scale
        return grad_q[..., :p], grad_k[..., :p], grad_v[..., :p], grad_bias, None, None


def flex(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h_kv s p"],
    v: Float[Tensor, "b h_kv s p_v"],
    key_bias: Float[Tensor, "b h_kv s"] | None,
    window: tuple[Int[Tensor, "b h_kv s"], Int[Tensor, "b h_kv t"]] | None,
) -> Float[Tensor, "b h t p_v"]:
    """Return attention by flex_attention, a window as ranks and floors in place of a matrix.

    Raises:
        ValueError: on a CPU, when a gradient is wanted: torch has none there.
    """
    on_cpu = q.device.type == "cpu"
    given = (x for x in (q, k, v, key_bias) if x is not None)
    if on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise ValueError("backend='flex' has no gradients on a CPU: use 'sdpa', or torch.no_grad()")
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    if key_bias is not None:
        q, k = fold(q, k, key_bias / scale)
    in_window = None
    if window is not None:
        rank, floor = window
        # torch counts a function's arguments, which a runtime type checker hides: hence lambdas.
        in_window = lambda score, b, h, t, s: torch.where(  # noqa: E731
            rank[b, h // group, s] >= floor[b, h // group, t], score, -torch.inf
        )
    call = flex_attention if on_cpu else _compile_flex()
    # With torch's default of three stages, such heads in fp32 need more shared memory than a
    # multiprocessor of an H100 has.
    wide = q.dtype == torch.float32 and q.shape[-1] > WIDE
    options: Any = {"fwd_num_stages": 1} if wide else None
    with warnings.catch_warnings():
        # On a CPU the unfused form is meant: what it warns of is what was asked for.
        warnings.filterwarnings("ignore", "flex_attention called without", UserWarning)
        z = call(
            *(x.detach() if on_cpu else x for x in (q, k, v)),
            score_mod=in_window,
            block_mask=_causal_blocks(q.shape[-2], k.shape[-2], q.device),
            scale=scale,
            enable_gqa=group > 1,
            kernel_options=options,
        )
    assert isinstance(z, Tensor)
    return z


@cache
def _compile_flex() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=True)


# Few, since decoding asks for one more key each time.
@lru_cache(maxsize=8)
def _causal_blocks(n_queries: int, n_keys: int, device: torch.device) -> BlockMask:
    """Return the causal mask by its blocks, without a matrix of queries and keys.

    A block of queries reads the blocks of keys up to its last query's, and those up to its first
    query's whole; a block of queries that is not full has none whole, since there flex must look
    at each place.
    """
    ahead = n_keys - n_queries
    causal = lambda b, h, t, s: s <= t + ahead  # noqa: E731
    # A gradient may later want what a call under inference_mode was the first to ask for.
    with torch.inference_mode(False):
        first = torch.arange(0, n_queries, BLOCK, device=device)
        last = (first + BLOCK - 1).clamp(max=n_queries - 1)
        read = (last + ahead) // BLOCK + 1
        whole = torch.where(first + BLOCK <= n_queries, (first + ahead + 1) // BLOCK, 0)
        blocks = torch.arange(-(-n_keys // BLOCK), device=device)
        partial = (whole[:, None] + blocks) % len(blocks)
        return BlockMask.from_kv_blocks(
            *((read - whole)[None, None].int(), partial[None, None].int()),
            *(whole[None, None].int(), blocks.expand_as(partial)[None, None].int()),
            BLOCK_SIZE=BLOCK,
            mask_mod=causal,
            seq_lengths=(n_queries, n_keys),
        )
