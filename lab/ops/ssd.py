"""State space duality (SSD): a linear recurrence with a scalar decay for each head and token.

    h_t = exp(dt_t A) h_{t−1} + dt_t x_t ⊗ B_t,   y_t = h_t C_t + D x_t

`ssd` computes it in chunks: masked attention within a chunk, and a state carried across chunks.
`ssd_step` computes one token. `lab.ops.ssd_forms` has the slow, obvious forms. Groups are
interleaved: head h uses B and C of group h // (H/G).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lab.ops.precision import keep_dtypes, promote
from lab.ops.ssd_backends import BACKENDS, resolve_backend
from lab.ops.ssd_inputs import SSDInputs


@keep_dtypes
def ssd(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None = None,
    chunk_len: int = 256,
    initial_state: Float[Tensor, "_ _ _ _"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return y, in x's dtype, and the state after the last token, in fp32 at least.

    The state lets a row be computed in parts:

    >>> import torch
    >>> x, dt, A = torch.randn(1, 8, 2, 4), torch.rand(1, 8, 2), -torch.ones(2)
    >>> B, C = torch.randn(2, 1, 8, 1, 16)
    >>> y, _ = ssd(x, dt, A, B, C)
    >>> _, state = ssd(x[:, :5], dt[:, :5], A, B[:, :5], C[:, :5])
    >>> rest, _ = ssd(x[:, 5:], dt[:, 5:], A, B[:, 5:], C[:, 5:], initial_state=state)
    >>> torch.allclose(y[:, 5:], rest, atol=1e-5)
    True

    Args:
        x: what tokens write, t ≥ 1.
        dt: step sizes, ≥ 0; they scale both the decay and the write, so that a token with dt = 0
            does not change the state.
        A: decay rates, ≤ 0; log-decay is dt·A.
        B: where tokens write in the state; g divides h.
        C: where tokens read.
        D: weight of the skip from x to y; None for no skip.
        chunk_len: most tokens of a chunk; the last one may be shorter. Any value gives the same
            result. Backend "torch" uses shorter chunks where they are faster.
        initial_state: [b h p n], the state before the first token; None is zero.
        backend: a name in `BACKENDS`, or "auto" for the fastest that is there.

    Raises:
        ValueError: for shapes that do not fit, chunk_len < 1, an unknown backend, or one that
            cannot run on x's device.
        RuntimeError: when the gradient of a backend other than "torch" is to be differentiated.

    Source: lst:ssd_algorithm_pytorch, errata S1–S3. Departs: the state is passed from chunk
        to chunk, so that no sum over chunks can run over the wrong index (S2).
    """
    inputs = SSDInputs(x, dt, A, B, C, D, chunk_len, initial_state)
    inputs.check()
    chosen = resolve_backend(backend, x.device)
    y, state = BACKENDS[chosen].run(inputs)
    if chosen == "torch" or torch.compiler.is_compiling():
        return y, state

    def refuse(grad: Tensor | None) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"SSD's backend={chosen!r} has no second derivative: build it with backend='torch'"
            )

    for z in (y, state):
        if z.requires_grad:
            z.register_hook(refuse)
    return y, state


@keep_dtypes
def ssd_step(
    x: Float[Tensor, "b h p"],
    dt: Float[Tensor, "b h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b g n"],
    C: Float[Tensor, "b g n"],
    D: Float[Tensor, " h"] | None,
    state: Float[Tensor, "_ _ _ _"],
) -> tuple[Float[Tensor, "b h p"], Float[Tensor, "b h p n"]]:
    """Return y of one token, in x's dtype, and the state after it, in fp32 at least: decoding.

    Args:
        x: what the token writes; arguments are those of `ssd` without the time axis.
        dt: step sizes, ≥ 0.
        A: decay rates, ≤ 0.
        B: where the token writes in the state; g divides h.
        C: where the token reads.
        D: weight of the skip from x to y; None for no skip.
        state: [b h p n], the state before the token.

    Raises:
        ValueError: for shapes that do not fit.
    """
    SSDInputs(x[:, None], dt[:, None], A, B[:, None], C[:, None], D, 1, state).check()
    high = promote(x)
    wide, dt, A, state = (z.to(high) for z in (x, dt, A, state))
    heads_in_group = x.shape[1] // B.shape[1]
    B, C = (z.to(high).repeat_interleave(heads_in_group, dim=1) for z in (B, C))
    write = (dt[..., None] * wide)[..., None] * B[..., None, :]
    state = (dt * A).exp()[..., None, None] * state + write
    y = (state @ C[..., None])[..., 0]
    if D is not None:
        y = y + D.to(high)[:, None] * wide
    return y.to(x.dtype), state
