"""The scan of a diagonal recurrence: each number of a state decays by itself.

    h_t = a_t ⊙ h_{t−1} + w_t

Tokens are in chunks, and all chunks go on at once, a token at a time, each from nothing. What a
chunk began with is then added, under the product of the decays since. Nothing is divided by a
decay, so that none is too strong.

Source: Blelloch 1990, Prefix sums and their applications: a scan in two levels.
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
    return _scan_chunks(decay, written) if needs_plain() else _Scan.apply(decay, written)


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


def _scan_chunks(decay, written, *, backwards=False):
    """Return the states, from the first token on, or from the last one."""
    order, t = -1 if backwards else 1, written.shape[1]
    chunk_len = 2 ** round(t.bit_length() / 2)  # about as many chunks as tokens in each
    if padding := -t % chunk_len:
        nothing = written.new_zeros(written.shape[0], padding, *written.shape[2:])
        decay, written = (torch.cat([z, nothing.to(z)], 1) for z in (decay, written))
    decays, writes = (z.unflatten(1, (-1, chunk_len)).unbind(2)[::order] for z in (decay, written))
    states, products = [writes[0]], [decays[0]]
    for a, w in zip(decays[1:], writes[1:], strict=True):
        states.append(torch.addcmul(w, a, states[-1]))
        products.append(a * products[-1])
    first = [torch.zeros_like(written[:, 0])]
    for a, w in list(zip(products[-1].unbind(1), states[-1].unbind(1), strict=True))[::order][:-1]:
        first.append(torch.addcmul(w, a, first[-1]))
    begun = torch.stack(first[::order], 1)
    whole = [torch.addcmul(w, a, begun) for a, w in zip(products, states, strict=True)]
    return torch.stack(whole[::order], 2).flatten(1, 2)[:, :t]


class _Scan(torch.autograd.Function):
    """Keeps decays and states alone; the gradient of what is written is the scan backwards."""

    @staticmethod
    def forward(ctx, decay, written):
        states = _scan_chunks(decay, written)
        ctx.save_for_backward(decay, written, states)
        return states

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        decay, written, states = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiate(_scan_chunks, (decay, written), (grad,))
        later = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], 1)
        to_written = _scan_chunks(later, grad, backwards=True)
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
