"""State space duality (SSD): a linear recurrence with a scalar decay for each head and token.

    h_t = exp(dt_t A) h_{t−1} + dt_t x_t ⊗ B_t,   y_t = h_t C_t + D x_t

`ssd` computes it by chunks, as masked attention within a chunk and a state carried across;
`lab.ops.ssd_forms` has the slow, obvious forms. Axis letter of this file, beside the package's:
j head within its group. Groups are interleaved: head h reads B and C of group h // (H/G).
"""

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lab.ops.ssd_decay import decay_matrix


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

    Args:
        x: what tokens write, t ≥ 1.
        dt: step sizes, > 0; they scale both the decay and the write.
        A: decay rates, < 0; log-decay is dt·A ≤ 0.
        B: where tokens write in the state; g divides h.
        C: where tokens read.
        D: weight of the skip from x to y; None for no skip.
        chunk_len: tokens handled as one matrix; the last chunk may be shorter. Any value gives
            the same result: short ones spend less on the decay matrix, long ones on states.
        initial_state: [b h p n], the state before the first token; None is zero.
        backend: a name in `BACKENDS`, or "auto" for the fastest that is there.

    Raises:
        ValueError: for shapes that do not fit, chunk_len < 1, or an unknown backend.

    Source: lst:ssd_algorithm_pytorch, errata S1–S3. Departs: the state is handed from chunk to
        chunk, so that no sum over chunks can run over the wrong one (S2).
    """
    _check(x, dt, A, B, C, D, chunk_len, initial_state)
    run = BACKENDS[resolve_backend(backend)]
    return run(x, dt, A, B, C, D, chunk_len, initial_state)


def resolve_backend(backend: str) -> str:
    """Return the backend that a request means: its own name, or for "auto" the fastest here.

    Raises:
        ValueError: for an unknown name; lists the known.
    """
    if backend == "auto":
        return "torch"
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of auto, {', '.join(BACKENDS)}")
    return backend


def ssd_chunked(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    log_decay: Float[Tensor, "b t h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None,
    chunk_len: int,
    initial_state: Float[Tensor, "b h p n"] | None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return what `ssd` does, for any log-decay ≤ 0; tensors of unlike precision meet in fp32.

    Within a chunk y = (L ∘ CBᵀ) dt x, with CBᵀ once for each group. Before it comes the state's
    part, which fades by exp(Σ_{k≤t} a_k); after it the state moves to the chunk's end.
    """
    high = torch.promote_types(x.dtype, torch.float32)
    g, p = B.shape[2], x.shape[3]
    values = rearrange(x.to(high) * dt.to(high)[..., None], "b t (g j) p -> b g j t p", g=g)
    log_decay = rearrange(log_decay.to(high), "b t (g j) -> b g j t", g=g)
    B, C = (rearrange(z.to(high), "b t g n -> b g t n") for z in (B, C))
    if initial_state is None:
        initial_state = values.new_zeros(x.shape[0], x.shape[2], p, B.shape[-1])
    state = rearrange(initial_state.to(high), "b (g j) p n -> b g (j p) n", g=g)

    chunks = zip(
        values.split(chunk_len, dim=-2),
        log_decay.split(chunk_len, dim=-1),
        B.split(chunk_len, dim=-2),
        C.split(chunk_len, dim=-2),
        strict=True,
    )
    outputs = []
    for values_c, log_decay_c, B_c, C_c in chunks:
        L = decay_matrix(log_decay_c)
        # The product is formed source-major because L is.
        M = (B_c @ C_c.mT).mT[:, :, None] * L
        faded = log_decay_c.cumsum(-1).exp()[..., None]
        from_state = rearrange(C_c @ state.mT, "b g l (j p) -> b g j l p", p=p)
        outputs.append(torch.addcmul(M @ values_c, from_state, faded))
        to_end = L[..., -1, :, None]
        write = rearrange(values_c * to_end, "b g j l p -> b g (j p) l") @ B_c
        state = state * faded[..., -1, :].repeat_interleave(p, dim=2) + write

    y = rearrange(torch.cat(outputs, dim=-2), "b g j t p -> b t (g j) p")
    if D is not None:
        y = torch.addcmul(y, x.to(high), D.to(high)[:, None])
    return y.to(x.dtype), rearrange(state, "b g (j p) n -> b (g j) p n", p=p)


def _torch(x, dt, A, B, C, D, chunk_len, initial_state):
    high = torch.promote_types(x.dtype, torch.float32)
    log_decay = dt.to(high) * A.to(high)
    return ssd_chunked(x, dt, log_decay, B, C, D, chunk_len, initial_state)


BACKENDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"torch": _torch}
"""Name → the function that computes `ssd` there; all take its arguments, checked, in its order."""


def _check(x, dt, A, B, C, D, chunk_len, initial_state) -> None:
    """Hold the shapes of `ssd` against x's and B's, before any kernel reads past an end."""
    b, t, h, p = x.shape
    g, n = B.shape[-2:]
    if t < 1:
        raise ValueError("x has t=0 tokens, must have at least 1")
    if chunk_len < 1:
        raise ValueError(f"{chunk_len=} must be at least 1")
    if g < 1 or h % g:
        raise ValueError(f"B has g={g} groups, must divide x's h={h} heads")
    expected = {
        "dt [b t h]": (dt, (b, t, h)),
        "A [h]": (A, (h,)),
        "B [b t g n]": (B, (b, t, g, n)),
        "C [b t g n]": (C, (b, t, g, n)),
        "D [h]": (D, (h,)),
        "initial_state [b h p n]": (initial_state, (b, h, p, n)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, must be {list(shape)}")
