"""Attention against torch's own and transformers': rotation, shared key heads, the dynamic mask."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab import peers
from lab.layers.attention import Attention
from lab.ops.rope import rotary_table
from tests.normal import draw_normal
from tests.parity.compare import assert_agree, config, deviation, draw_parameters, modules

D_MODEL, N_HEADS, T = 24, 4, 19
D_HEAD = D_MODEL // N_HEADS


def small(family: str, n_kv_heads: int, **options: Any) -> Any:
    """A small layer's configuration; attention by SDPA, because the eager one rounds to fp32."""
    heads = {"num_attention_heads": N_HEADS, "num_key_value_heads": n_kv_heads}
    return config(family, D_MODEL, attn_implementation="sdpa", **heads, **options)


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as transformers' layers take them, in fp64: [1 t p], each pair's twice."""
    cos, sin = rotary_table(positions, D_HEAD, dtype=torch.float64)
    return torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]


def projections(theirs: nn.Module) -> dict[str, Tensor]:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
    return {f"{our}.weight": theirs.get_parameter(f"{name}.weight") for our, name in names.items()}


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_sdpa(n_kv_heads):
    ours = draw_parameters(Attention(D_MODEL, N_HEADS, n_kv_heads=n_kv_heads, position="none"))
    x = draw_normal(2, T, D_MODEL)
    q, k, v = (f(x).unflatten(-1, (-1, D_HEAD)).transpose(1, 2) for f in (ours.q, ours.k, ours.v))
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = ours.out(z.transpose(1, 2).flatten(2))
    assert deviation(ours(x), expected) <= 1e-14
    assert deviation(ours.project(x, ours.matrix(x) @ ours.values(x)), expected) <= 1e-14


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_llama(n_kv_heads):
    theirs = draw_parameters(modules("llama").LlamaAttention(small("llama", n_kv_heads), 0))
    table = angles(torch.arange(T))
    assert_agree(
        Attention(D_MODEL, N_HEADS, n_kv_heads=n_kv_heads).double(),
        projections(theirs),
        theirs,
        lambda x: theirs(x, table)[0],
        draw_normal(2, T, D_MODEL),
    )


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_jamba_has_no_positions(n_kv_heads):
    theirs = draw_parameters(modules("jamba").JambaAttention(small("jamba", n_kv_heads), 0))
    assert_agree(
        Attention(D_MODEL, N_HEADS, n_kv_heads=n_kv_heads, position="none").double(),
        projections(theirs),
        theirs,
        lambda x: theirs(x)[0],
        draw_normal(2, T, D_MODEL),
    )


def test_llama_decodes_from_a_cache():
    theirs = draw_parameters(modules("llama").LlamaAttention(small("llama", 2), 0))
    ours = Attention(D_MODEL, N_HEADS, n_kv_heads=2).double()
    ours.load_state_dict(projections(theirs))
    cache = peers.load("transformers.cache_utils").DynamicCache()
    x, state, start = draw_normal(2, T, D_MODEL), None, 0
    for end in (T - 3, T - 2, T - 1, T):
        table = angles(torch.arange(start, end))
        expected, _ = theirs(x[:, start:end], table, None, cache)
        if state is None:
            y, state = ours.prefill(x[:, :end])
        else:
            y, state = ours.step(x[:, start], state)
        assert deviation(y.view_as(expected), expected) <= 1e-14
        start = end


def test_rotary_angles():
    """transformers' θ and angles are fp32: each rounds twice, which an angle multiplies."""
    theirs = modules("llama").LlamaRotaryEmbedding(small("llama", 2))
    positions = torch.arange(0, 4096, 7)
    for a, b in zip(theirs(draw_normal(1), positions[None]), angles(positions), strict=True):
        bound = 4 * 2**-24 * (1 + positions[:, None])
        assert ((a - b).abs()[0] <= bound).all()


@pytest.mark.parametrize("window", [2, 3, T - 1, None])
@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_doge_mask(n_kv_heads, window):
    """Doge's dynamic mask is mask='value', and its window of kept keys is ours.

    transformers 5.23.0 adds the causal mask before it ranks, so each query ranks its own past.
    Its norms of queries and keys, which we have not, are left out there.
    """
    options = small("doge", n_kv_heads, keep_window_size=T if window is None else window)
    theirs = draw_parameters(modules("doge").DogeAttention(options, 0))
    theirs.q_norm = theirs.k_norm = nn.Identity()
    ours = Attention(D_MODEL, N_HEADS, n_kv_heads=n_kv_heads, mask="value", window=window)
    causal = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
    table = angles(torch.arange(T))
    assert_agree(
        ours.double(),
        projections(theirs) | {"mask.A": theirs.A, "mask.dt.weight": theirs.dt_proj.weight},
        theirs,
        lambda x: theirs(x, table, causal)[0],
        draw_normal(2, T, D_MODEL),
        # The bias's gradient sums to zero over a query's keys: in A's, most of it cancels.
        roundings=1024,
    )
