"""State space duality against public pure-torch forms; the fp64 recurrence settles who is right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import peers
from lab.ops.ssd import ssd
from lab.ops.ssd_forms import repeat_groups, ssd_recurrent
from tests.parity.compare import deviation

CHUNK = 8
NAMES = ("x", "dt", "A", "B", "C", "D", "initial_state")

Form = Callable[..., tuple[Tensor, Tensor | None]]
"""(x, dt, A, B, C, D, initial_state) → (y, state)."""


def minimal(x, dt, A, B, C, D, initial_state, chunk_len=CHUNK):
    """It knows one group a head, and no skip."""
    form = peers.load("mamba_ssm.modules.ssd_minimal").ssd_minimal_discrete
    B, C = repeat_groups(B, x.shape[2]), repeat_groups(C, x.shape[2])
    before = None if initial_state is None else initial_state[:, None]
    y, state = form(x * dt[..., None], dt * A, B, C, chunk_len, before)
    return with_skip(y, x, D), state


def reference(x, dt, A, B, C, D, initial_state, chunk_len=CHUNK):
    """It neither takes nor returns a state."""
    assert initial_state is None
    form = peers.load("mamba_ssm.ops.triton.ssd_combined").ssd_chunk_scan_combined_ref
    return form(x, dt, A, B, C, chunk_len, D), None


def mamba2_scan(x, dt, A, B, C, D, initial_state, chunk_len=CHUNK):
    """The slow path of transformers' Mamba-2."""
    form = peers.load("transformers.models.mamba2.modeling_mamba2").mamba2_chunk_scan
    return form(x, dt, A, B, C, chunk_len, D, None, initial_state, return_final_states=True)


def stepwise(x, dt, A, B, C, D, initial_state):
    """mamba-ssm's decoding step, token by token; it writes into the state it is given."""
    form = peers.load("mamba_ssm.ops.triton.selective_state_update").selective_state_update_ref
    state = initial_state.clone()
    p, n = state.shape[2:]
    wide_A, wide_D = A[:, None, None].expand(-1, p, n), D[:, None].expand(-1, p)
    tokens = zip(x.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1), strict=True)
    y = [
        form(state, x_t, dt_t[..., None].expand(-1, -1, p), wide_A, B_t, C_t, wide_D)
        for x_t, dt_t, B_t, C_t in tokens
    ]
    return torch.stack(y, 1), state


def gla(form: str, **sizes: int) -> Form:
    """fla's simple gated linear attention: q = C, k = B, v = dt x, g = dt A, state transposed."""

    def run(x, dt, A, B, C, D, initial_state):
        naive = getattr(peers.load("fla.ops.simple_gla.naive"), f"naive_{form}_simple_gla")
        q, k = repeat_groups(C, x.shape[2]), repeat_groups(B, x.shape[2])
        if form == "parallel":
            assert initial_state is None
            return with_skip(naive(q, k, x * dt[..., None], dt * A, scale=1.0)[0], x, D), None
        y, state = naive(
            q,
            k,
            x * dt[..., None],
            dt * A,
            scale=1.0,
            initial_state=None if initial_state is None else initial_state.mT,
            output_final_state=True,
            **sizes,
        )
        return with_skip(y, x, D), state.mT

    return run


def with_skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    return y if D is None else y + D[:, None] * x


@dataclass(frozen=True)
class Peer:
    """A public form, and what it can do.

    Attributes:
        dtype: it computes in; what it is given is fp64 anyway where `exact`.
        state: whether it takes and returns one.
        any_length: whether T % chunk may be other than 0.
        gradient: whether autograd can go through it.
    """

    run: Form
    dtype: torch.dtype = torch.float32
    state: bool = True
    any_length: bool = True
    gradient: bool = True


PEERS = {
    "mamba-ssm minimal": Peer(minimal, torch.float64, any_length=False),
    "mamba-ssm reference": Peer(reference, state=False, any_length=False),
    "mamba-ssm step": Peer(stepwise, torch.float64, gradient=False),
    "transformers": Peer(mamba2_scan),
    "fla recurrent": Peer(gla("recurrent")),
    "fla chunk": Peer(gla("chunk", chunk_size=CHUNK)),
    "fla parallel": Peer(gla("parallel"), state=False),
}

# Some tens of roundings, relative to the largest number in the tensor.
TOLERANCE = {torch.float64: 32 * 2**-53, torch.float32: 32 * 2**-24}


def problem(t: int, g: int, dtype: torch.dtype, decay: float = 0.5) -> list[Any]:
    """Four heads, whose states outlive a chunk; `decay` bounds the rates."""
    b, h, p, n = 2, 4, 3, 6
    generator = torch.Generator().manual_seed(g)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, dt, A = normal(b, t, h, p), normal(b, t, h).sigmoid(), -decay * normal(h).sigmoid()
    tensors = [x, dt, A, normal(b, t, g, n), normal(b, t, g, n), normal(h), normal(b, h, p, n)]
    return [tensor.requires_grad_() for tensor in tensors]


def gradients(y: Tensor, state: Tensor | None, inputs: list[Any]) -> tuple[Tensor, ...]:
    """Of a sum in which each number of y and of the state has a weight of its own."""
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    for z in (y, state):
        if z is not None:
            weight = torch.randn(z.shape, generator=generator, dtype=torch.float64)
            loss = loss + (z.double() * weight).sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("g", [1, 2, 4])
@pytest.mark.parametrize("t", [3 * CHUNK, 3 * CHUNK + 5, CHUNK - 2])
@pytest.mark.parametrize("name", PEERS)
def test_values_and_gradients(name, t, g):
    peer = PEERS[name]
    if t % CHUNK and not peer.any_length:
        t = 4 * CHUNK
    inputs = problem(t, g, peer.dtype)[: 7 if peer.state else 6]
    state = inputs[6] if peer.state else None
    ours = ssd(*inputs[:6], chunk_len=CHUNK, initial_state=state)
    with torch.set_grad_enabled(peer.gradient):
        theirs = peer.run(*inputs[:6], state)
    tolerance = TOLERANCE[peer.dtype]
    assert deviation(ours[0], theirs[0]) <= tolerance
    if theirs[1] is not None:
        assert deviation(ours[1], theirs[1]) <= tolerance
    if peer.gradient:
        after = ours[1] if peer.state else None
        pairs = zip(gradients(ours[0], after, inputs), gradients(*theirs, inputs), strict=True)
        far = {name: deviation(a, b) for name, (a, b) in zip(NAMES, pairs, strict=False)}
        assert all(value <= tolerance for value in far.values()), far


def test_reference_refuses_a_last_chunk_that_is_shorter():
    """mamba-ssm 2.3.2: its reference pads dt to whole chunks, and then asserts whole ones of x."""
    inputs = [*problem(CHUNK + 3, 2, torch.float64)[:6], None]
    with pytest.raises(AssertionError):
        reference(*inputs)
    expected, _ = ssd_recurrent(*inputs)
    assert deviation(ssd(*inputs[:6], chunk_len=CHUNK)[0], expected) <= TOLERANCE[torch.float64]


def test_reference_rounds_dt_to_fp32():
    """mamba-ssm 2.3.2: dt goes through fp32, so that fp64 comes out no better than fp32."""
    inputs = [*problem(3 * CHUNK, 2, torch.float64)[:6], None]
    expected, _ = ssd_recurrent(*inputs)
    assert 2**-30 < deviation(reference(*inputs)[0], expected) < 2**-20
    assert deviation(ssd(*inputs[:6], chunk_len=CHUNK)[0], expected) <= TOLERANCE[torch.float64]


def test_reference_has_no_gradient_where_states_are_forgotten():
    """mamba-ssm 2.3.2: its reference masks what exp has made, and infinity times zero is NaN.

    In fp32 a sequence whose log-decays sum to −89 is enough: 2,048 tokens of −0.05 each.
    """
    inputs = problem(12 * CHUNK, 1, torch.float32, decay=10.0)[:6]
    total = (inputs[1] * inputs[2]).sum(1).amin()
    in_a_chunk = (inputs[1] * inputs[2]).unflatten(1, (-1, CHUNK)).sum(2).amin()
    assert total < -89 < in_a_chunk
    theirs = gradients(*reference(*[*inputs, None]), inputs)
    nan = [name for name, z in zip(NAMES, theirs, strict=False) if z.isnan().any()]
    assert nan == ["dt", "A"]
    exact = [z.detach().double().requires_grad_() for z in inputs]
    expected = gradients(ssd_recurrent(*exact)[0], None, exact)
    ours = gradients(ssd(*inputs, chunk_len=CHUNK)[0], None, inputs)
    for a, b in zip(ours, expected, strict=True):
        assert deviation(a, b) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("form", "at_least"),
    [
        pytest.param(gla("parallel"), 100, id="fla parallel"),
        pytest.param(gla("chunk", chunk_size=256), 5, id="fla chunk"),
        pytest.param(lambda *z: reference(*z, chunk_len=256), 20, id="mamba-ssm reference"),
    ],
)
def test_differences_of_a_running_sum_cancel(form, at_least):
    """fla 0.6.0 and mamba-ssm 2.3.2 take segments of decay as differences of one running sum.

    At 2,048 tokens in fp32 that is 10 to 400 times less exact than sums of the segments.
    """
    inputs = [*(z.detach() for z in problem(2048, 4, torch.float32, decay=5.0)[:6]), None]
    expected, _ = ssd_recurrent(*(z.double() for z in inputs[:6]))
    ours = deviation(ssd(*inputs[:6], chunk_len=256)[0], expected)
    assert ours <= 8 * 2**-24
    assert deviation(form(*inputs)[0], expected) >= at_least * ours
