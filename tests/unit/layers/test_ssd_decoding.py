"""The SSD layer decoded: steps, carried states, padding, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.hooks import hooks
from lab.layers.attention import Attention
from lab.layers.ssd import SSD, SSDState
from tests.normal import draw_normal
from tests.ssd_variants import HOOKS, POSITIONS, every_variant, layer, moved


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def assert_same_states(actual: SSDState, expected: SSDState) -> None:
    assert_same(actual.ssm, expected.ssm)
    assert_same(actual.conv, expected.conv)
    assert torch.equal(actual.position, expected.position)


def in_steps(mixer: SSD, x: Tensor, state: SSDState) -> tuple[Tensor, SSDState]:
    """Return what `prefill` does, a token at a time."""
    outputs = []
    for token in x.unbind(1):
        y, state = mixer.step(token, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def test_gradients_pass_through_a_carried_state():
    mixer, x = moved(position="conv", gate="norm"), draw_normal(2, 9, 12).requires_grad_()
    leaves, against = [x, *mixer.parameters()], draw_normal(2, 9, 12, seed=1)
    first, state = mixer.prefill(x[:, :5])
    actual = torch.cat([first, in_steps(mixer, x[:, 5:], state)[0]], dim=1)
    assert_same(
        torch.autograd.grad(actual, leaves, against),
        torch.autograd.grad(mixer(x), leaves, against),
    )


KEEP = torch.tensor(
    [
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],  # padded on the left
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],  # on the right
        [0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0],  # wherever
        [1] * 13,
        [0] * 13,
    ]
).bool()


@every_variant
def test_padding_is_not_read(options):
    mixer, x = moved(**options), draw_normal(5, 13, 12)
    x[~KEEP] = torch.nan
    state = mixer.prefill(draw_normal(5, 3, 12, seed=1))[1]
    y, last = mixer.prefill(x, state, KEEP)
    assert y.isfinite().all()
    after = mixer.step(draw_normal(5, 12, seed=2), last)[0]
    for row in range(5):
        here = slice(row, row + 1)
        before = SSDState(*(z[here] for z in state))
        expected, expected_last = y[here, :0], before
        if KEEP[row].any():
            expected, expected_last = mixer.prefill(x[here, KEEP[row]], before)
        assert_same(y[here, KEEP[row]], expected)
        assert_same_states(SSDState(*(z[here] for z in last)), expected_last)
        assert_same(after[here], mixer.step(draw_normal(5, 12, seed=2)[here], expected_last)[0])


@pytest.mark.parametrize("position", POSITIONS)
def test_padding_gets_no_gradient_and_changes_none(position):
    mixer, x = moved(position=position, gate="norm"), draw_normal(5, 13, 12).requires_grad_()
    y, _ = mixer.prefill(x, keep=KEEP)
    (grad,) = torch.autograd.grad((y * draw_normal(*y.shape, seed=1)).sum(), x)
    assert not grad[~KEEP].any()
    alone = mixer.prefill(x[:1, KEEP[0]])[0]
    loss = (alone * draw_normal(*y.shape, seed=1)[:1, KEEP[0]]).sum()
    assert_same(grad[:1], torch.autograd.grad(loss, x)[0][:1])


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_returns_is_carried(name):
    mixer, x = moved(), draw_normal(2, 9, 12)
    with hooks(mixer, [(f"hook_{name}", lambda z, _: z / 2)]):
        y, last = mixer.prefill(x)
        first, state = mixer.prefill(x[:, :4])
        second, state = in_steps(mixer, x[:, 4:], state)
    assert_same(torch.cat([first, second], dim=1), y)
    assert_same_states(state, last)
    assert (y - mixer(x)).abs().max() > 1e-3


def test_the_state_is_in_fp32_at_least_and_small():
    mixer, x = layer(position="conv").bfloat16(), draw_normal(2, 40, 12).bfloat16()
    y, last = mixer.prefill(x)
    assert y.dtype == torch.bfloat16
    for state in (mixer.start(2), last, mixer.step(x[:, 0], last)[1]):
        assert (state.ssm.dtype, state.conv.dtype) == (torch.float32, torch.float32)
        assert (state.ssm.shape, state.conv.shape) == ((2, 4, 3, 6), (2, 3, 36))
        for z in state:
            assert z.untyped_storage().nbytes() == z.numel() * z.element_size()
    assert layer().start(2).conv.numel() == 0


@pytest.mark.parametrize("position", ["rope", "conv"])
def test_refuses_states_and_padding_that_do_not_fit(unchecked, position):
    mixer, x = layer(position=position), draw_normal(2, 5, 12)
    with pytest.raises(ValueError, match="state has batch 3, must be x's 2"):
        mixer.prefill(x, mixer.start(3))
    with pytest.raises(ValueError, match="state has batch 3, must be x's 2"):
        mixer.step(x[:, 0], mixer.start(3))
    with pytest.raises(ValueError, match=r"\[2, 4, 3, 4\], must be \[2, 4, 3, 6\]"):
        mixer.prefill(
            x, layer(position=position, d_state=4).start(2)._replace(conv=mixer.start(2).conv)
        )
    with pytest.raises(ValueError, match=r"keep is torch.bool \[2, 4\], must be bool \[2, 5\]"):
        mixer.prefill(x, keep=torch.ones(2, 4).bool())


def test_refuses_the_tail_of_another_convolution(unchecked):
    mixer, other = layer(position="conv"), layer(position="conv", conv_width=3)
    for call in (mixer.prefill, lambda x, state: mixer.step(x[:, 0], state)):
        with pytest.raises(ValueError, match=r"tail is \[2, 2, 36\], must be \[2, 3, 36\]"):
            call(draw_normal(2, 5, 12), other.start(2))


def test_refuses_the_state_of_another_mixer(unchecked):
    mixer, x = layer(), draw_normal(2, 5, 12)
    other = Attention(12, 2).double().start(2)
    for call in (mixer.prefill, lambda x, state: mixer.step(x[:, 0], state)):
        with pytest.raises(ValueError, match="state is AttentionState, must be SSDState"):
            call(x, other)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"state.conv is 3 wide, must be 0"):
            call(x, layer(position="conv").start(2))
    with pytest.raises(ValueError, match="state is SSDState, must be AttentionState"):
        Attention(12, 2).double().prefill(x, mixer.start(2))  # type: ignore[arg-type]
