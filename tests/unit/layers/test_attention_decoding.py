"""Attention token by token: the same numbers as at once, from a carried state, around padding."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lab.layers.attention import Attention, AttentionState, Mask
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mask import reveal_stored
from tests.normal import draw_normal

A, IFA = Attention, InnerFunctionAttention

LAYERS = {
    "plain": lambda: A(8, 2),
    "literal": lambda: A(8, 2, mask="literal"),
    "straight-through": lambda: A(8, 2, mask="straight-through"),
    "value": lambda: A(8, 2, mask="value"),
    "literal window": lambda: A(8, 2, mask="literal", window=3),
    "value window": lambda: A(16, 4, mask="value", window=2, n_kv_heads=2),
    "oracle window": lambda: A(8, 2, mask="oracle", window=3),
    "ifa grouped": lambda: IFA(16, 4, value_map="linear", n_kv_heads=2, mask="value", window=3),
}
"""That the laws of decoding hold is tested on `tests.cases`; here is what they do not ask."""
EVERY = pytest.mark.parametrize("name", list(LAYERS))
T = 13


@contextmanager
def tell_mask(layer: Attention, batch: int = 3) -> Iterator[None]:
    """Tell an oracle mask what to keep; nothing to others."""
    if layer.mask is None or layer.mask.__class__.__name__ != "OracleMask":
        yield
        return
    keep = (torch.arange(4 * T) % 3 == 1).expand(batch, -1)
    with reveal_stored(layer, keep):
        yield


def make_layer(name: str) -> tuple[Attention, Tensor]:
    """A layer with noise on its parameters, so that masks mask, and an input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = LAYERS[name]().double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) / 2)
    return layer, draw_normal(3, T, layer.q.in_features)


def close(found: Tensor, right: Tensor):
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


@EVERY
def test_gradients_pass_through_carried_states(name: str):
    layer, x = make_layer(name)
    parameters = list(layer.parameters())
    against = draw_normal(3, T, x.shape[-1], seed=1)
    with tell_mask(layer):
        right, state, outputs = layer(x), layer.start(3), []
        for part in x.tensor_split((1, 2, 9), dim=1):
            y, state = layer.prefill(part, state)
            outputs.append(y)
        found = torch.cat(outputs, 1)
    close(found, right)
    grads = (torch.autograd.grad(y, parameters, against, allow_unused=True) for y in (found, right))
    for mine, other in zip(*grads, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            close(mine, other)


def spread_rows(x: Tensor, kept: Tensor) -> Tensor:
    """The rows of x [b t d] spread over the places that `kept` [b n] marks, huge noise between."""
    wide = 100 * draw_normal(*kept.shape, x.shape[-1], seed=9)
    for row, places in enumerate(kept):
        wide[row, places] = x[row, : int(places.sum())]
    return wide


LEFT = torch.arange(T + 4) >= torch.tensor([[4], [0], [7]])
SIDES = pytest.mark.parametrize(
    "kept",
    [LEFT, LEFT.flip(1), draw_normal(3, T, seed=5) > -0.3],
    ids=["left", "right", "anywhere"],
)


@EVERY
@SIDES
def test_padding_changes_nothing(name: str, kept: Tensor):
    """Each row's real tokens give what they give alone; then decoding goes on from there."""
    layer, x = make_layer(name)
    x = torch.cat([x, draw_normal(3, 4, x.shape[-1], seed=3)], 1)
    following = draw_normal(3, 2, x.shape[-1], seed=4)
    with tell_mask(layer):
        y, state = layer.prefill(spread_rows(x, kept), keep=kept)
        steps = []
        for t in range(2):
            z, state = layer.step(following[:, t], state)
            steps.append(z)
    assert y.isfinite().all()
    for row, count in enumerate(kept.sum(1).tolist()):
        one = torch.cat([x[[row], :count], following[[row]]], 1)
        with tell_mask(layer, 1):
            alone = layer(one)[0]
        close(y[row, kept[row]], alone[:count])
        close(torch.stack(steps, 1)[row], alone[count:])
        assert state.position[row] == count + 2


def test_padding_gets_and_gives_no_gradient():
    layer, x = make_layer("value window")
    kept = LEFT[:, :T]
    x = x.requires_grad_()
    y, _ = layer.prefill(x, keep=kept)
    (grad,) = torch.autograd.grad(y[kept].square().sum(), x)
    assert grad.isfinite().all()
    assert not grad[~kept].any()
    assert grad[kept].any(-1).all()


@pytest.mark.parametrize("name", ["literal", "straight-through", "literal window"])
def test_padding_below_keys_that_are_all_masked(name: str):
    """An empty row reads its real keys alone, even where every one of them is masked."""
    layer, x = make_layer(name)
    layer.get_parameter("mask.l").data.fill_(-0.2)
    kept = LEFT[:, 4:]
    y, _ = layer.prefill(spread_rows(x, kept), keep=kept)
    for row, count in enumerate(kept.sum(1).tolist()):
        close(y[row, kept[row]], layer(x[[row], :count])[0])


def test_a_mask_is_asked_once_a_key():
    layer, x = make_layer("value")
    _, state = layer.prefill(x[:, :-1])
    with torch.no_grad():
        layer.get_parameter("mask.A").zero_()
        _, after = layer.step(x[:, -1], state)
    assert after.bias is not None
    assert state.bias is not None
    assert torch.equal(after.bias[..., :-1], state.bias)
    assert torch.equal(after.bias[..., -1], torch.ones_like(after.bias[..., -1]))


def test_only_key_heads_are_cached():
    layer, x = make_layer("value window")
    _, state = layer.prefill(x)
    assert isinstance(state, AttentionState)
    assert state.k.shape == state.v.shape == (3, 2, T, 4)
    assert state.bias is not None
    assert state.bias.shape == (3, 2, T)
    plain, x = make_layer("plain")
    assert plain.prefill(x)[1].bias is None


def test_decoding_past_the_table_is_an_error():
    layer = A(8, mask="soft", max_seq_len=5)
    _, state = layer.prefill(torch.ones(1, 5, 8))
    with pytest.raises(ValueError, match="position 5 is beyond the mask's table of max_seq_len=5"):
        layer.step(torch.ones(1, 8), state)


@pytest.mark.parametrize("mask", ["literal", "straight-through", "soft", "oracle"])
def test_a_position_before_the_table_is_an_error(mask: Mask):
    """As an index of the table it would be read from the end."""
    layer = A(8, mask=mask, max_seq_len=5)
    with tell_mask(layer, 1), pytest.raises(ValueError, match="position -3 must be at least 0"):
        layer.prefill(torch.ones(1, 2, 8), layer.start(1, position=-3))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (A(16, 2), r"state\.k is \[3, 2, 0, 8\], must be \[3, 2, 0, 4\]"),
        (A(8, 1), r"state\.k is \[3, 1, 0, 8\], must be \[3, 2, 0, 4\]"),
        (A(8, 2, n_kv_heads=1), r"state\.k is \[3, 1, 0, 4\], must be \[3, 2, 0, 4\]"),
        (A(8, 2, d_value=20), r"state\.v is \[3, 2, 0, 10\], must be \[3, 2, 0, 4\]"),
    ],
)
def test_a_state_of_another_layer_is_an_error(unchecked, other: Attention, words: str):
    with pytest.raises(ValueError, match=words):
        A(8, 2).prefill(torch.ones(3, 4, 8), other.start(3))
    with pytest.raises(ValueError, match=words):
        A(8, 2).step(torch.ones(3, 8), other.start(3))


def test_a_state_of_another_batch_is_an_error(unchecked):
    layer = A(8)
    with pytest.raises(ValueError, match="state has batch 2, must be x's 3"):
        layer.prefill(torch.ones(3, 4, 8), layer.start(2))
    with pytest.raises(ValueError, match=r"keep is torch\.bool \[3, 5\], must be bool \[3, 4\]"):
        layer.prefill(torch.ones(3, 4, 8), keep=torch.ones(3, 5, dtype=torch.bool))
