"""What layers refuse; sizes by default; what is printed; experts compiled and in autocast."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lab.layers.attention import Attention
from lab.layers.cdmoe import CDMoE
from lab.layers.convolution import CausalConvolution
from lab.layers.family.differential import DifferentialAttention
from lab.layers.family.sliding_window import SlidingWindowAttention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mlp import MLP
from lab.layers.peer import PEER
from lab.layers.printed import (
    DynamicBaseAttention,
    FloorSquareCDMoE,
    HeadRotatedAttention,
    MaskAfterSoftmaxAttention,
    SoftSumAttention,
    TargetSummedSSD,
)
from lab.layers.routed import RoutedMoE, SharedExpertMoE
from lab.layers.ssd import SSD

SMALL: dict[type[nn.Module], dict[str, Any]] = {
    Attention: {"d_model": 8, "n_heads": 2},
    InnerFunctionAttention: {"d_model": 8, "n_heads": 2},
    SlidingWindowAttention: {"d_model": 8, "n_heads": 2},
    DifferentialAttention: {"d_model": 8, "n_heads": 2},
    SSD: {"d_model": 12, "n_heads": 4},
    MLP: {"d_model": 8},
    CausalConvolution: {"channels": 3},
    CDMoE: {"d_model": 8, "n_experts": 12},
    PEER: {"d_model": 8, "n_experts": 12},
    RoutedMoE: {"d_model": 8, "n_experts": 5, "d_ff": 6},
    SharedExpertMoE: {"d_model": 8, "n_experts": 5, "d_ff": 6},
    HeadRotatedAttention: {"d_model": 8},
    DynamicBaseAttention: {"d_model": 8},
    MaskAfterSoftmaxAttention: {"d_model": 8},
    SoftSumAttention: {"d_model": 8},
    TargetSummedSSD: {"d_model": 8},
    FloorSquareCDMoE: {"d_model": 8},
}
BAD: list[tuple[type[nn.Module], dict[str, Any], str]] = [
    (Attention, {"d_model": 9}, "d_model=9 must be a positive multiple of n_heads=2"),
    (Attention, {"n_heads": 0}, "n_heads=0"),
    (Attention, {"d_model": 16, "n_heads": 8, "n_kv_heads": 3}, "=3 must divide n_heads=8"),
    (Attention, {"n_kv_heads": 0}, "n_kv_heads=0 must divide n_heads=2"),
    (Attention, {"backend": "xla"}, "backend='xla': must be one of auto, sdpa, flex"),
    (Attention, {"d_value": 3}, "d_value=3 must be a positive multiple"),
    (Attention, {"d_model": 9, "n_heads": 3}, "must be even for position='rope'"),
    (Attention, {"position": "alibi"}, "position='alibi': must be one of rope, none"),
    (Attention, {"rope_layout": "thirds"}, "must be one of half, interleaved"),
    (Attention, {"mask": "hard"}, "must be one of none, literal, straight-through, soft"),
    (Attention, {"window": 4}, "window=4 needs a mask"),
    (Attention, {"mask": "value", "window": 0}, "window=0 must be at least 1"),
    (SlidingWindowAttention, {"window": 0}, "window=0 must be at least 1"),
    (DifferentialAttention, {"n_heads": 4}, "d_model / n_heads = 2 must be a multiple of 4 for"),
    (DifferentialAttention, {"lambda_init": 1.0}, "lambda_init=1.0 must be in"),
    (InnerFunctionAttention, {"k": 3}, "k=3 must be between 1 and n_values=2"),
    (InnerFunctionAttention, {"d_retrieval": 0}, "d_retrieval=0 must be at least 1"),
    (
        InnerFunctionAttention,
        {"retrieval": "hard"},
        "must be one of literal, softmax, sigmoid",
    ),
    (InnerFunctionAttention, {"value_map": "cubic"}, "must be one of diagonal, linear"),
    (InnerFunctionAttention, {"key_init": "ones"}, "key_init='ones': must be one of normal, zeros"),
    (InnerFunctionAttention, {"d_value": 4}, "must be d_model=8 for value_map='diagonal'"),
    (InnerFunctionAttention, {"n_kv_heads": 1}, "must be n_heads=2 for value_map='diagonal'"),
    (InnerFunctionAttention, {"value_map": "linear", "d_value": 3}, "must be a positive multiple"),
    (SSD, {"d_model": 13}, "d_model=13 must be a positive multiple of n_heads=4"),
    (SSD, {"d_model": 0}, "d_model=0 must be at least 1"),
    (SSD, {"d_inner": 13}, "d_inner=13 must be a positive multiple of n_heads=4"),
    (SSD, {"n_groups": 3}, "n_groups=3 must divide n_heads=4"),
    (SSD, {"d_state": 5}, "d_state=5 must be even for position='rope'"),
    (SSD, {"d_state": 0}, "d_state=0 must be at least 1"),
    (SSD, {"chunk_len": 0}, "chunk_len=0 must be at least 1"),
    (SSD, {"conv_width": 4}, "conv_width=4 needs position='conv', not position='rope'"),
    (SSD, {"position": "conv", "conv_width": 0}, "conv_width=0 must be at least 1"),
    (SSD, {"position": "alibi"}, "position='alibi': must be one of rope, conv, decay, none"),
    (SSD, {"gate": "swish"}, "gate='swish': must be one of none, silu, norm"),
    (SSD, {"activation": "relu"}, "activation='relu': must be one of auto, silu, none"),
    (SSD, {"backend": "cuda"}, "backend='cuda': must be one of auto, torch"),
    (SSD, {"rope_layout": "halves"}, "rope_layout='halves': must be one of half, interleaved"),
    (SSD, {"dt_init": "zero"}, "dt_init='zero': must be one of mamba2, long, paper"),
    (SSD, {"memory": 1e-300}, r"memory=1e-300 must be from 0\.01 to 1e\+09 tokens"),
    (SSD, {"memory": float("nan")}, "memory=nan must be from"),
    (SSD, {"memory": 10**400}, "must be from"),
    (SSD, {"memory": 4.0, "dt_init": "long"}, r"memory=4\.0 replaces dt_init='long': give one"),
    (SSD, {"memory": 4.0, "position": "none"}, "needs a decay, not position='none'"),
    (SSD, {"groups": "mixed"}, "groups='mixed': must be one of interleaved, tiled"),
    (MLP, {"d_model": 0}, "d_model=0: must be ≥ 1"),
    (MLP, {"d_ff": 0}, "d_ff=0: must be ≥ 1"),
    (MLP, {"activation": "swish"}, "activation='swish': must be one of silu, gelu, relu"),
    (CausalConvolution, {"channels": 0}, "channels=0 must be at least 1"),
    (CausalConvolution, {"width": 0}, "width=0 must be at least 1"),
    (CDMoE, {"n_experts": 13}, "n_experts=13: .* prime; near numbers"),
    (CDMoE, {"k": 13}, "k=13: must be in 1 … n_experts=12"),
    (CDMoE, {"d_retrieval": 5}, "d_retrieval=5: must be ≥ 2 and even"),
    (CDMoE, {"n_retrieval_heads": 0}, "n_retrieval_heads=0: must be ≥ 1"),
    (CDMoE, {"d_ff": 0}, "d_ff=0: must be ≥ 1"),
    (CDMoE, {"form": "three"}, "form='three': must be one of one, two"),
    (CDMoE, {"score": "within"}, "score='within': must be one of inside, outside, raw"),
    (CDMoE, {"key_init": "ones"}, "key_init='ones': must be one of normal, zeros"),
    (CDMoE, {"activation": "swish"}, "activation='swish': must be one of silu, gelu, relu"),
    (PEER, {"n_experts": 13}, "13: .* prime; near numbers that factor: 12 = 3 × 4 and 15"),
    (PEER, {"n_experts": 0}, "n_experts=0: must be in 1 …"),
    (PEER, {"k": 0}, "k=0: must be in 1 … n_experts=12"),
    (PEER, {"score_activation": "tanh"}, "='tanh': must be one of softmax, relu"),
    (PEER, {"query_norm": "layer"}, "query_norm='layer': must be one of none, batch"),
    (PEER, {"backend": "sparse"}, "backend='sparse': must be one of auto, gather, dense"),
    (RoutedMoE, {"k": 6}, "k=6: must be in 1 … n_experts=5"),
    (RoutedMoE, {"n_experts": 0}, "n_experts=0: must be ≥ 1"),
    (RoutedMoE, {"d_ff": 0}, "d_ff=0: must be ≥ 1"),
    (RoutedMoE, {"balance_weight": -0.1}, "balance_weight=-0.1: must be ≥ 0"),
    (RoutedMoE, {"balance_weight": float("nan")}, "balance_weight=nan: must be ≥ 0"),
    (RoutedMoE, {"activation": "swish"}, "='swish': must be one of silu, gelu, relu"),
    (RoutedMoE, {"backend": "sorted"}, "='sorted': must be one of auto, loop, grouped_mm"),
    (RoutedMoE, {"backend": "grouped_mm"}, "16 bytes, not the 24 of width 6"),
    (
        SharedExpertMoE,
        {"n_shared": 0},
        "=0: must be ≥ 1; without shared experts: RoutedMoE",
    ),
    (HeadRotatedAttention, {"n_heads": 3}, "must be a positive multiple"),
    (HeadRotatedAttention, {"n_heads": 8}, "= 1 must be even"),
    (DynamicBaseAttention, {"n_heads": 4}, "= 2 must be at least 4"),
    (DynamicBaseAttention, {"max_position": 0}, "max_position=0 must be at least 1"),
    (DynamicBaseAttention, {"scaling": 0.5}, "scaling=0.5 must be at least 1"),
    (MaskAfterSoftmaxAttention, {"max_seq_len": 0}, "max_seq_len=0 must be at least 1"),
    (SoftSumAttention, {"n_values": 0}, "n_values=0 must be at least 1"),
    (SoftSumAttention, {"d_retrieval": 0}, "d_retrieval=0 must be at least 1"),
    (TargetSummedSSD, {"n_heads": 3}, "must be a positive multiple"),
    (TargetSummedSSD, {"d_state": 3}, "d_state=3 must be even"),
    (TargetSummedSSD, {"chunk_len": 0}, "chunk_len=0 must be at least 1"),
    (FloorSquareCDMoE, {"n_experts": 12, "k": 10}, "k=10: must be in 1 … n_experts=9"),
]


@pytest.mark.parametrize(("cls", "options", "words"), BAD)
def test_errors_name_field_value_and_bound(unchecked, cls, options, words):
    with pytest.raises(ValueError, match=words):
        cls(**{**SMALL[cls], **options})


@pytest.mark.parametrize("d_model", [1, 6, 64])
@pytest.mark.parametrize("cls", [CDMoE, PEER, RoutedMoE])
def test_experts_of_default_sizes_fit_any_width(cls: type[nn.Module], d_model: int):
    assert cls(d_model)(torch.randn(1, 3, d_model)).shape == (1, 3, d_model)


@pytest.mark.parametrize(
    ("cls", "options", "end"),
    [
        (Attention, {}, "no mask"),
        (Attention, {"backend": "flex"}, ", flex"),
        (RoutedMoE, {"backend": "loop"}, ", loop"),
        (PEER, {"backend": "dense"}, ", dense"),
        (SSD, {}, ", by torch"),
        (SSD, {"backend": "fla"}, ", by fla"),
    ],
)
def test_a_backend_is_shown_without_asking_whether_it_can_run(cls, options, end):
    assert cls(**{**SMALL[cls], **options}).extra_repr().endswith(end)


# PyTorch 2.13's compiler instantiates any custom autograd.Function, against its own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("unchecked")  # the compiler cannot trace the tests' type checker
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (CDMoE, {}),
        (PEER, {"backend": "dense"}),
        (RoutedMoE, {"d_ff": 8}),
    ],
)
def test_experts_compile_whole(cls, options):
    torch.manual_seed(0)
    layer, x = cls(**{**SMALL[cls], **options}), torch.randn(2, 5, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads, expected = (
        torch.autograd.grad(form(x).square().sum(), list(layer.parameters()))
        for form in (compiled, layer)
    )
    assert_close(grads, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", [CDMoE, PEER, RoutedMoE])
def test_experts_run_under_autocast(cls: type[nn.Module]):
    layer = cls(**SMALL[cls])
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(2, 5, 8))
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
