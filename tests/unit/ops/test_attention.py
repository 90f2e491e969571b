"""Causal attention: every kernel against the explicit form, and what masks weigh."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from lab.ops.attention import (
    LARGEST_KEEP,
    MASKED,
    Backend,
    _causal_blocks,
    attend,
    attention_pattern,
    attention_scores,
    repeat_heads,
    resolve_attention_backend,
)
from lab.ops.top_keys import causal_keep, top_keys
from tests.normal import draw_normal


def inputs(
    t: int, s: int, p: int, p_v: int, h: int = 3, h_kv: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a bias with some keys masked."""
    q, k, v = (
        draw_normal(2, h, t, p),
        draw_normal(2, h_kv, s, p, seed=1),
        draw_normal(2, h_kv, s, p_v, seed=2),
    )
    bias = draw_normal(2, h_kv, s, seed=3)
    return q, k, v, torch.where(bias > 0.7, MASKED, bias)


BIASED = pytest.mark.parametrize(
    ("biased", "window"), [(False, None), (True, None), (True, 1), (True, 3), (True, 50)]
)
SHAPES = pytest.mark.parametrize(
    ("t", "s", "p", "p_v", "h", "h_kv"),
    [
        (17, 17, 6, 6, 3, 3),
        (17, 17, 3, 11, 3, 3),
        (17, 17, 4, 5, 4, 2),
        (5, 17, 8, 4, 6, 3),
        (2, 9, 4, 4, 3, 3),
        (1, 9, 4, 4, 3, 3),
        (1, 9, 4, 4, 4, 1),
    ],
)


def explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, window: int | None) -> Tensor:
    keep = None
    if window is not None:
        assert bias is not None
        keep = repeat_heads(top_keys(bias, window, q.shape[2]), q.shape[1])
    return attention_pattern(q, k, bias, keep) @ repeat_heads(v, q.shape[1])


@BIASED
@SHAPES
def test_attend_is_the_explicit_form(
    t: int, s: int, p: int, p_v: int, h: int, h_kv: int, biased: bool, window: int | None
):
    leaves = [x.requires_grad_() for x in inputs(t, s, p, p_v, h, h_kv)]
    q, k, v, bias = leaves
    fast = attend(q, k, v, bias if biased else None, window)
    slow = explicit(q, k, v, bias if biased else None, window)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    against, used = draw_normal(*fast.shape, seed=4), leaves if biased else leaves[:3]
    for mine, right in zip(
        torch.autograd.grad(fast, used, against),
        torch.autograd.grad(slow, used, against),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-11)


@BIASED
@pytest.mark.parametrize(
    ("t", "s", "p", "p_v", "h", "h_kv"),
    [(17, 17, 3, 11, 3, 3), (5, 17, 8, 4, 6, 3), (140, 300, 4, 4, 2, 1)],
)
def test_flex_is_the_explicit_form(
    t: int, s: int, p: int, p_v: int, h: int, h_kv: int, biased: bool, window: int | None
):
    q, k, v, bias = inputs(t, s, p, p_v, h, h_kv)
    given = bias if biased else None
    fast = attend(q, k, v, given, window, backend="flex")
    torch.testing.assert_close(fast, explicit(q, k, v, given, window), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("t", "s"),
    [(1, 1), (1, 300), (127, 127), (128, 128), (129, 129), (384, 384), (140, 300), (256, 511)],
)
def test_the_causal_blocks_are_those_of_the_matrix(t: int, s: int):
    """For forward and backward alike: which blocks are read, and which without a look inside."""
    ahead = s - t
    mine = _causal_blocks(t, s, torch.device("cpu"))
    right = create_block_mask(lambda b, h, t, s: s <= t + ahead, None, None, t, s, device="cpu")
    assert (mine.seq_lengths, mine.BLOCK_SIZE) == (right.seq_lengths, right.BLOCK_SIZE)
    for side in ("kv", "full_kv", "q", "full_q"):
        counts, listed = (
            [getattr(mask, f"{side}_{of}")[0, 0].tolist() for mask in (mine, right)]
            for of in ("num_blocks", "indices")
        )
        assert counts[0] == counts[1]
        cut = [
            [sorted(row[:n]) for row, n in zip(*pair, strict=True)]
            for pair in zip(listed, counts, strict=True)
        ]
        assert cut[0] == cut[1]


@pytest.mark.parametrize(
    ("backend", "device", "keep_bytes", "chosen"),
    [
        ("auto", "cpu", 0, "sdpa"),
        ("auto", "cpu", 2 * LARGEST_KEEP, "sdpa"),
        ("auto", "cuda", LARGEST_KEEP, "sdpa"),
        ("auto", "cuda", LARGEST_KEEP + 1, "flex"),
        ("sdpa", "cuda", LARGEST_KEEP + 1, "sdpa"),
        ("flex", "cpu", 0, "flex"),
    ],
)
def test_the_backend_that_is_chosen(backend: str, device: str, keep_bytes: int, chosen: str):
    assert resolve_attention_backend(backend, torch.device(device), keep_bytes) == chosen


@pytest.mark.gpu
@BIASED
@SHAPES
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_gpu_kernels_are_the_explicit_form(
    t: int,
    s: int,
    p: int,
    p_v: int,
    h: int,
    h_kv: int,
    biased: bool,
    window: int | None,
    backend: Backend,
):
    """In fp32, where kernels sum in another order: 1e-4 of outputs near one."""
    leaves = [x.cuda().float().requires_grad_() for x in inputs(t, s, 16 * p, 16 * p_v, h, h_kv)]
    q, k, v, bias = leaves
    fast = attend(q, k, v, bias if biased else None, window, backend)
    slow = explicit(q, k, v, bias if biased else None, window)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-4)
    against, used = draw_normal(*fast.shape, seed=4).to(fast), leaves if biased else leaves[:3]
    for mine, right in zip(
        torch.autograd.grad(fast, used, against),
        torch.autograd.grad(slow, used, against),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-3)


@pytest.mark.parametrize("queries", [64, 40], ids=["kernel", "folded"])
def test_bf16_keeps_the_bias_to_16_bits(queries: int):
    """Within bf16's rounding of weights and output, which one bf16 column would not be.

    Weights and output are each rounded once (u = 2^-9); the low column moves a score by at most
    2^-17 of the largest bias, 0.0003 here: |Δ| ≤ (2·2^-9 + 2·0.0003) max|v| < 2^-7 max|v|.
    """
    q, k, v, bias = (x.bfloat16() for x in inputs(queries, 64, 16, 16))
    bias = -40 + bias.double().clamp(-3, 3) / 7
    right = attention_pattern(q.double(), k.double(), bias) @ v.double()
    bound = 2**-7 * v.double().abs().max().item()
    assert (attend(q, k, v, bias).double() - right).abs().max() < bound
    coarse = (bias * 4).bfloat16().double() / 4
    assert (attend(q, k, v, coarse).double() - right).abs().max() > bound


@pytest.mark.parametrize("queries", [32, 20], ids=["kernel", "folded"])
def test_autocast_does_not_lose_the_bias(queries: int):
    q, k, v, bias = inputs(queries, 32, 16, 16)
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    bias = (-40 + bias.clamp(-3, 3) / 7).float()
    right = attention_pattern(q, k, bias) @ v
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = attend(q, k, v, bias)
    assert fast.dtype == torch.bfloat16
    assert (fast - right).abs().max() < 2**-7 * v.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_explicit_scores_are_precise_under_autocast(dtype: torch.dtype):
    q, k, _, bias = (x.to(dtype) for x in inputs(12, 12, 16, 16))
    scores = attention_scores(q, k, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, pattern = attention_scores(q, k, bias), attention_pattern(q, k, bias)
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(cast, scores)
    assert torch.equal(pattern, attention_pattern(q, k, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_keys_weigh_exactly_nothing(dtype: torch.dtype):
    q, k, v, bias = (x.to(dtype) for x in inputs(12, 12, 4, 4))
    bias[..., 0] = 0
    masked = bias == MASKED
    assert masked.any()
    leaked = v.masked_fill(masked[..., None], 1e6)
    assert torch.equal(attend(q, k, leaked, bias), attend(q, k, v, bias))
    pattern = attention_pattern(q, k, bias)
    assert not pattern.mT[masked].any()
    row = (0, 1)
    kept = ~masked[row]
    alone = (q[row][-1] @ k[row][kept].T / 2 + bias[row][kept]).softmax(-1) @ v[row][kept]
    torch.testing.assert_close(attend(q, k, v, bias)[row][-1], alone)


def test_empty_rows_are_plain_causal_attention():
    """Erratum D3: a row whose every key is masked is finite, and so is its gradient."""
    q, k, v, _ = inputs(12, 12, 4, 4)
    bias = torch.full((2, 3, 12), MASKED, dtype=torch.float64)
    plain = attend(q, k, v)
    torch.testing.assert_close(attend(q, k, v, bias), plain, rtol=0, atol=1e-11)
    bias[..., 7:] = 0
    fast = attend(q.requires_grad_(), k, v, bias)
    torch.testing.assert_close(fast[..., :7, :], plain[..., :7, :], rtol=0, atol=1e-11)
    fast.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    none = torch.zeros(12, 12, dtype=torch.bool)
    assert torch.equal(attention_pattern(q, k, keep=none), attention_pattern(q, k))


def test_one_query_reads_every_key():
    """Erratum D3: decoding, the last query stands at the last key."""
    q, k, v, bias = inputs(9, 9, 4, 4)
    last = attend(q[..., -1:, :], k, v, bias)
    torch.testing.assert_close(last, attend(q, k, v, bias)[..., -1:, :], rtol=0, atol=1e-12)
    scores = attention_scores(q[..., -1:, :], k)
    assert scores.isfinite().all()
    with pytest.raises(ValueError, match="n_queries=3 must be at most n_keys=2"):
        causal_keep(3, 2, torch.device("cpu"))


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((4, 4, 4, 4), {"window": 2}, "window=2 needs key_bias"),
        ((4, 4, 4, 4, 3, 2), {}, "k has 2 heads, which must divide q's 3"),
        ((5, 4, 4, 4), {}, "n_queries=5 must be at most n_keys=4"),
        ((4, 4, 4, 4), {"backend": "flex"}, "backend='flex' has no gradients on a CPU"),
        ((4, 4, 4, 4), {"backend": "flash"}, "backend='flash': must be one of auto, sdpa, flex"),
    ],
)
def test_what_cannot_be_is_refused(unchecked, shape, options, words):
    q, k, v, _ = inputs(*shape)
    with pytest.raises(ValueError, match=words):
        attend(q.requires_grad_(), k, v, **options)
    with pytest.raises(ValueError, match="backend='flex' needs CUDA or a CPU, not meta"):
        resolve_attention_backend("flex", torch.device("meta"))
