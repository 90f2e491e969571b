"""Relatives of attention: hooks on what they add, and decoding with a masked key."""

import pytest
import torch
from torch import Tensor

from lab.layers.family.differential import DifferentialAttention
from lab.layers.family.distance import ALiBi, ForgettingAttention
from lab.layers.family.sliding_window import SlidingWindowAttention
from lab.layers.family.stickbreaking import StickBreakingAttention
from lab.ops.attention import MASKED
from tests.normal import draw_normal

CLASSES = [
    ALiBi,
    ForgettingAttention,
    SlidingWindowAttention,
    StickBreakingAttention,
    DifferentialAttention,
]


@pytest.mark.parametrize("cls", CLASSES)
@torch.no_grad()
def test_a_masked_key_is_not_read_and_decoding_agrees(cls):
    mixer = cls(8, 2).double()
    x = draw_normal(2, 9, 8, dtype=torch.float64)

    def mask(bias: Tensor, point) -> Tensor:
        """Mask the sixth token, the last that prefill reads; further ones are not touched."""
        hidden = torch.arange(bias.shape[-1]) == 5
        return bias.masked_fill(hidden, MASKED)

    mixer.hook_dynamic_mask.add_hook(mask)
    whole, pattern = mixer(x), mixer.matrix(x)
    assert not pattern[:, :, 6:, 5].any()
    torch.testing.assert_close(mixer.project(x, pattern @ mixer.values(x)), whole)
    first, state = mixer.prefill(x[:, :6])
    rest = []
    for token in x[:, 6:].unbind(1):
        y, state = mixer.step(token, state)
        rest.append(y)
    torch.testing.assert_close(torch.cat([first, torch.stack(rest, 1)], 1), whole)


@pytest.mark.parametrize("cls", CLASSES)
@torch.no_grad()
def test_an_idle_hook_on_scores_and_pattern_changes_nothing(cls):
    mixer = cls(8, 2).double()
    x, at = draw_normal(2, 9, 8, dtype=torch.float64), torch.tensor([[0, 4, 8], [2, 3, 7]])
    whole, some = mixer(x), mixer(x, at=at)
    seen: dict[str, Tensor] = {}
    for name in ("hook_attn_scores", "hook_pattern"):
        point = getattr(mixer, name)
        point.add_hook(lambda z, point, name=name: seen.setdefault(name, z))
    torch.testing.assert_close(mixer(x), whole)
    torch.testing.assert_close(seen["hook_pattern"], mixer.matrix(x))
    for name in ("hook_attn_scores", "hook_pattern"):
        getattr(mixer, name).remove_hooks()
    torch.testing.assert_close(some, torch.stack([y[i] for y, i in zip(whole, at, strict=True)]))


def test_the_gates_are_an_input_of_forgetting_attention():
    mixer = ForgettingAttention(8, 2)
    kept: dict[str, Tensor] = {}
    mixer.hook_log_forget.add_hook(lambda z, point: kept.update(gates=z))
    y = mixer(draw_normal(1, 6, 8, dtype=torch.float32))
    (gradient,) = torch.autograd.grad(y.sum(), kept["gates"])
    assert list(gradient.shape) == [1, 6, 2]
    # Before the first gate stands no token that it could let fade.
    assert not gradient[:, 0].abs().gt(1e-6).any()
    assert gradient[:, 1:].abs().gt(1e-6).all()


@torch.no_grad()
def test_closed_gates_leave_the_token_itself():
    mixer = ForgettingAttention(8, 2)
    mixer.f.bias.fill_(-200.0)
    x = draw_normal(1, 100, 8, dtype=torch.float32)
    torch.testing.assert_close(mixer.matrix(x), torch.eye(100).expand(1, 2, -1, -1))
    torch.testing.assert_close(mixer(x), mixer.out(mixer.v(x)))
