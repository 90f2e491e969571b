"""The scan of a diagonal recurrence: each number of a state decays by itself.

    h_t = a_t ⊙ h_{t−1} + w_t

Two neighbouring tokens are one token of a recurrence that is half as long: its decay is
a_{t+1} a_t, and it writes a_{t+1} w_t + w_{t+1}. The states of that recurrence are every second
state of this one. Nothing is divided by a decay, so that none is too strong.

Source: Blelloch 1990, Prefix sums and their applications.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lab.ops.derivatives import differentiate, needs_plain
from lab.ops.precision import keep_dtypes


@keep_dtypes
def scan(
    decay: Float[Tensor, "b t *state"],
    written: Float[Tensor, "b t *state"],
    initial_state: Float[Tensor, " b *state"] | None = None,
) -> Float[Tensor, "b t *state"]:
    """Return the state after each token.

    >>> import torch
    >>> scan(torch.full((1, 4), 0.5), torch.ones(1, 4))
    tensor([[1.0000, 1.5000, 1.7500, 1.8750]])

    Args:
        decay: a, of t ≥ 1 tokens.
        written: w.
        initial_state: the state before the first token; None is zero.

    Raises:
        ValueError: for shapes that do not fit, or no tokens.
    """
    _check(decay, written, initial_state)
    if initial_state is not None:
        first = written[:, :1] + decay[:, :1] * initial_state[:, None].to(written)
        written = torch.cat([first, written[:, 1:]], 1)
    return _halve(decay, written) if needs_plain() else _Scan.apply(decay, written)


def scan_loop(
    decay: Float[Tensor, "b t *state"],
    written: Float[Tensor, "b t *state"],
    initial_state: Float[Tensor, " b *state"] | None = None,
) -> Float[Tensor, "b t *state"]:
    """Return what `scan` returns, token by token: the definition."""
    _check(decay, written, initial_state)
    state = torch.zeros_like(written[:, 0]) if initial_state is None else initial_state.to(written)
    states = []
    for a, w in zip(decay.unbind(1), written.unbind(1), strict=True):
        state = a * state + w
        states.append(state)
    return torch.stack(states, 1)


def _halve(decay, written):
    t = written.shape[1]
    if t == 1:
        return written
    (a, b), (v, w) = (z[:, : t - t % 2].unflatten(1, (-1, 2)).unbind(2) for z in (decay, written))
    second = _halve(a * b, b * v + w)
    third = written[:, 2::2] + decay[:, 2::2] * second[:, : (t - 1) // 2]
    first = torch.cat([written[:, :1], third], 1)
    states = torch.stack([first[:, : t // 2], second], 2).flatten(1, 2)
    return states if t % 2 == 0 else torch.cat([states, first[:, -1:]], 1)


class _Scan(torch.autograd.Function):
    """Keeps decays and states alone; the gradient of what is written is the scan backwards."""

    @staticmethod
    def forward(ctx, decay, written):
        states = _halve(decay, written)
        ctx.save_for_backward(decay, written, states)
        return states

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        decay, written, states = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiate(_halve, (decay, written), (grad,))
        later = torch.cat([decay[:, 1:], decay[:, :1]], 1)
        to_written = _halve(later.flip(1), grad.flip(1)).flip(1)
        to_decay = torch.zeros_like(decay)
        to_decay[:, 1:] = to_written[:, 1:] * states[:, :-1]
        return to_decay, to_written


def _check(decay, written, initial_state) -> None:
    if written.ndim < 2 or written.shape[1] == 0:
        raise ValueError(f"written is {list(written.shape)}, must be [b t …] with t ≥ 1")
    if decay.shape != written.shape:
        raise ValueError(f"decay is {list(decay.shape)}, must be {list(written.shape)}")
    before = [*written[:, 0].shape]
    if initial_state is not None and list(initial_state.shape) != before:
        raise ValueError(f"initial_state is {list(initial_state.shape)}, must be {before}")
