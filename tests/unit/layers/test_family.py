"""Mixers of the family refuse options that they cannot have, and keep the promises they make."""

from typing import Any

import pytest
import torch

from lab.layers.family.comba import Comba
from lab.layers.family.deltaproduct import GatedDeltaProduct
from lab.layers.family.distance import ALiBi, ForgettingAttention
from lab.layers.family.gla import GatedLinearAttention
from lab.layers.family.hgrn2 import HGRN2
from lab.layers.family.hyena import Hyena
from lab.layers.family.kda import KimiDeltaAttention
from lab.layers.family.log_linear import LogLinearAttention
from lab.layers.family.mamba import Mamba1
from lab.layers.family.mamba3 import Mamba3
from lab.layers.family.mlstm import MLSTM
from lab.layers.family.retnet import Retention
from lab.layers.family.rglru import RGLRU
from lab.layers.family.rwkv6 import RWKV6
from lab.layers.family.rwkv7 import RWKV7
from lab.layers.family.sliding_window import SlidingWindowAttention
from lab.layers.family.ttt import TTTLinear
from lab.layers.recurrence import shift
from tests.normal import draw_normal
from tests.parity.compare import draw_parameters


@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (GatedLinearAttention, {"gate_rank": 0}, "gate_rank=0 must be at least 1"),
        (GatedLinearAttention, {"gate_slowness": 0.0}, "gate_slowness=0.0 must be positive"),
        (GatedDeltaProduct, {"n_writes": 0}, "n_writes=0 must be at least 1"),
        (GatedDeltaProduct, {"position": "rope"}, "position='rope' must be 'none'"),
        (HGRN2, {"lower_bound": 1.0}, r"lower_bound=1.0 must be in \[0, 1\)"),
        (HGRN2, {"position": "rope"}, "position='rope' must be 'none'"),
        (HGRN2, {"qk_norm": "l2"}, "qk_norm='l2' must be 'none'"),
        (KimiDeltaAttention, {"rank": 0}, "rank=0 must be at least 1"),
        (Hyena, {"n_bands": 0}, "n_bands=0 must be at least 1"),
        (LogLinearAttention, {"n_levels": 1}, "n_levels=1 must be at least 2"),
        (Mamba1, {"dt_rank": 0}, "dt_rank=0 must be at least 1"),
        (RGLRU, {"d_inner": 9}, "d_inner=9 must be a positive multiple of n_heads=2"),
        (TTTLinear, {"batch_len": 0}, "batch_len=0 must be at least 1"),
        (MLSTM, {"gate_cap": float("nan")}, "gate_cap=nan must be positive"),
        (Mamba3, {"mimo_rank": 0}, "mimo_rank=0 must be at least 1"),
        (Mamba3, {"rotated": 1.5}, r"rotated=1.5 must be in \[0, 1\]"),
        (Mamba3, {"dt_min": 0.2}, r"dt_min=0.2, dt_max=0.1: must be 0 < dt_min ≤ dt_max"),
        (Mamba3, {"conv_width": 4}, "conv_width=4 must be 0: Mamba-3 has none"),
        (Mamba3, {"position": "rope"}, "position='rope' must be 'none'"),
        (RWKV6, {"mix_rank": 0}, "mix_rank=0 must be at least 1"),
        (RWKV6, {"decay_rank": 0}, "decay_rank=0 must be at least 1"),
        (RWKV7, {"rank": 0}, "rank=0 must be at least 1"),
        (RWKV7, {"gate_rank": 0}, "gate_rank=0 must be at least 1"),
    ],
)
def test_options_are_refused(cls: type, options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        cls(8, **{"n_heads": 2} if cls not in (Hyena, Mamba1) else {}, **options)


def test_heads_of_retention_halve_their_state_in_twice_the_tokens():
    rates = torch.tensor(Retention(8, 4).rates)
    torch.testing.assert_close(rates.exp(), 1 - 0.5 ** torch.arange(5.0, 9.0))


@torch.no_grad()
def test_a_forget_gate_does_not_fall_below_its_bound():
    layer, seen = HGRN2(8, 2, lower_bound=0.5), []
    layer.hook_log_decay.register_forward_hook(lambda module, args, out: seen.append(out))
    layer(100 * draw_normal(1, 50, 8, dtype=torch.float32))
    assert 0.5 <= seen[0].exp().min() < 0.51


@pytest.mark.parametrize("bias", [-1000.0, 1000.0])
def test_mlstm_is_finite_however_strong_its_gates_are(bias: float):
    layer = MLSTM(8, 2, gate_cap=80.0, chunk_len=4)
    torch.nn.init.constant_(layer.i_proj.bias, bias)
    torch.nn.init.constant_(layer.f_proj.bias, -bias)
    x = draw_normal(1, 30, 8, dtype=torch.float32).requires_grad_()
    y, state = layer.prefill(x)
    y.sum().backward()
    assert all(z.isfinite().all() for z in (y, x.grad, *state) if z is not None)
    assert state.carry.tolist() == [[80.0, 80.0] if bias > 0 else [0.0, 0.0]]


@pytest.mark.parametrize("bias", [-1000.0, 100.0])
def test_comba_is_finite_however_fast_it_forgets(bias: float):
    """With no state left of the last token, what a token wrote is still fed back to the next."""
    layer = Comba(8, 2, conv_width=0, chunk_len=4)
    torch.nn.init.constant_(layer.a_proj.bias, bias)
    x = draw_normal(1, 30, 8, dtype=torch.float32).requires_grad_()
    y = layer(x)
    y.sum().backward()
    gradients = [p.grad for p in (x, *layer.parameters())]
    assert y.isfinite().all()
    assert all(z is not None and z.isfinite().all() for z in gradients)
    torch.testing.assert_close(layer.double()(x.double()).float(), y, rtol=1e-4, atol=1e-5)


def test_a_shift_passes_over_padding():
    x = torch.arange(1.0, 6.0).view(1, 5, 1)
    keep = torch.tensor([[False, True, False, True, True]])
    before, last = shift(x, torch.tensor([[9.0]]), keep)
    assert before.flatten()[keep[0]].tolist() == [9.0, 2.0, 4.0]
    assert last.tolist() == [[5.0]]
    assert shift(x, torch.zeros(1, 1))[0].flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "cls",
    [
        GatedDeltaProduct,
        GatedLinearAttention,
        HGRN2,
        LogLinearAttention,
        MLSTM,
        Mamba3,
        Retention,
        RWKV6,
        RWKV7,
    ],
)
@torch.no_grad()
def test_states_that_are_watched_are_those_that_are_read(cls: type):
    layer, seen = cls(8, 2, chunk_len=4).double(), []
    x = draw_normal(2, 11, 8)
    expected, state = layer.prefill(x)
    handle = layer.hook_state.register_forward_hook(lambda module, args, out: seen.append(out))
    y, watched = layer.prefill(x[:, :10])
    last, watched = layer.step(x[:, 10], watched)
    torch.testing.assert_close(torch.cat([y, last[:, None]], 1), expected)
    torch.testing.assert_close(watched, state)
    assert [z.shape[:3] for z in seen] == [(2, 10, 2), (2, 1, 2)]
    handle.remove()
    layer.hook_state.register_forward_hook(lambda module, args, out: 0 * out)
    assert not torch.allclose(layer(x), expected)


@pytest.mark.parametrize("cls", [ALiBi, ForgettingAttention])
@torch.no_grad()
def test_long_rows_are_exact_in_fp32(cls):
    """Scores here fall by hundreds along the row, of which fp32 holds five decimals."""
    mixer = draw_parameters(cls(8, 2))
    x = draw_normal(1, 1300, 8, dtype=torch.float64)
    exact = mixer(x)
    single = mixer.float()(x.float())
    assert (single - exact).abs().max() < 3e-6 * exact.abs().max()


@torch.no_grad()
def test_sliding_window_keeps_no_more_than_it_reads():
    mixer = SlidingWindowAttention(8, 2, window=4)
    _, state = mixer.prefill(draw_normal(2, 20, 8, dtype=torch.float32))
    assert state.k.shape[2] == state.v.shape[2] == 4
