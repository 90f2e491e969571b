"""State space duality: one function in three forms, and what its matrix must be."""

from typing import Any

import torch
from hypothesis import given, target
from hypothesis import strategies as st
from torch import Tensor

from lab.ops.ssd import ssd
from lab.ops.ssd_decay import segment_sums
from lab.ops.ssd_forms import (
    matrix_from_decay,
    read_states,
    scan_states,
    ssd_matrix,
    ssd_quadratic,
    ssd_recurrent,
    state_writes,
)

Problem = dict[str, Any]  # arguments of `ssd` by name
chunk_lens = st.integers(1, 12)


@st.composite
def problems(draw, min_t: int = 1, state: bool = True) -> Problem:
    """Draw structure and fill it in fp64; D and the initial state are sometimes left out."""
    b, t = draw(st.integers(1, 2)), draw(st.integers(min_t, 40))
    g, p, n = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    h = g * draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    problem = {
        "x": normal(b, t, h, p) * 2.0 ** draw(st.integers(-10, 10)),
        # From steps that forget nothing to steps that forget all.
        "dt": (normal(b, t, h) + draw(st.integers(-6, 2))).exp(),
        "A": -normal(h).exp(),
        "B": normal(b, t, g, n),
        "C": normal(b, t, g, n),
    }
    if draw(st.booleans()):
        problem["D"] = normal(h)
    if state and draw(st.booleans()):
        problem["initial_state"] = normal(b, h, p, n)
    return problem


def largest(z: Tensor) -> float:
    return z.abs().max().item()


def assert_same(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Compare to a part of the largest entry: cancellation spares no small one."""
    error = largest(actual - expected)
    scale = tolerance * largest(expected)
    assert error <= scale, f"{name} is off by {error:.1e} of {largest(expected):.1e}"


def with_gradients(form, problem: Problem, **options) -> Problem:
    """Return y, the last state, and the gradients of a sum over both with unlike weights."""
    leaves = {name: z.clone().requires_grad_() for name, z in problem.items()}
    y, state = form(**leaves, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(z.shape, generator=generator, dtype=torch.float64) for z in (y, state)]
    loss = (y * weights[0].to(y)).sum() + (state * weights[1].to(y)).sum()
    loss.backward()
    gradients = {f"gradient of {name}": z.grad for name, z in leaves.items()}
    return {"y": y.detach(), "state": state.detach(), **gradients}


@given(problems(), chunk_lens)
def test_forms_agree_in_values_and_gradients(problem, chunk_len):
    expected = with_gradients(ssd_recurrent, problem)
    for actual in (
        with_gradients(ssd_quadratic, problem),
        with_gradients(ssd, problem, chunk_len=chunk_len),
    ):
        for name, value in expected.items():
            # A and dt are where gradients cancel: they sum over pairs of tokens of either sign.
            assert_same(actual[name], value, 1e-10, name)


@given(problems(state=False), chunk_lens)
def test_fp32_is_within_its_bound(problem, chunk_len):
    """|Δy| ≤ u·Σ_s |M_ts|·[t + n + 10 + (t + 3)·|log L_ts|]·|x_s|, M of |C| and |B|.

    A term passes n roundings in C·B, at most t in the sum over s, chunk by chunk, and some ten in
    its products; its log-decay, off by t + 1 roundings of itself, and exp's own argument, move it
    by as many times |log L|.
    """
    single = {name: z.float() for name, z in problem.items()}
    exact = {name: z.double() for name, z in single.items()}
    t, n = exact["B"].shape[1], exact["B"].shape[-1]
    positive = {name: z.abs() for name, z in exact.items() if name not in {"x", "A"}}
    M = ssd_matrix(A=exact["A"], **positive)
    log_L = segment_sums((exact["dt"] * exact["A"]).mT).nan_to_num(neginf=0.0)
    roundings = t + n + 10 - (t + 3) * log_L
    bound = 2.0**-24 * torch.einsum("bhts,bshp->bthp", M * roundings, exact["x"].abs())
    error = (ssd(**single, chunk_len=chunk_len)[0] - ssd_recurrent(**exact)[0]).abs()
    # What underflows is lost whole.
    worst = largest(error / (bound + 1e-30))
    target(worst, label="fp32 SSD: error / bound")
    assert worst <= 1


@given(problems(), chunk_lens)
def test_fp32_gradients_are_near_those_in_fp64(problem, chunk_len):
    single = {name: z.float() for name, z in problem.items()}
    exact = with_gradients(ssd_recurrent, {name: z.double() for name, z in single.items()})
    t, n = single["B"].shape[1], single["B"].shape[-1]
    forgotten = min(largest((single["dt"] * single["A"]).sum(1)), 100.0)
    # As above, once forward and once backward, but against the gradient's largest entry: one
    # that cancels throughout loses up to three more digits.
    tolerance = 2.0**-24 * 2 * (t + n + 10 + forgotten)
    actual = with_gradients(ssd, single, chunk_len=chunk_len)
    ratios = [
        largest(actual[name] - value) / (tolerance * largest(value) + 1e-30)
        for name, value in exact.items()
    ]
    target(max(ratios), label="fp32 gradients: error / tolerance before cancellation")
    assert max(ratios) <= 100


def part(problem: Problem, span: slice) -> Problem:
    """Return a stretch of tokens."""
    return {name: z[:, span] if name in {"x", "dt", "B", "C"} else z for name, z in problem.items()}


@given(problems(min_t=2), chunk_lens, st.data())
def test_a_state_is_carried_over_any_split(problem, chunk_len, data):
    cut = data.draw(st.integers(1, problem["x"].shape[1] - 1))

    def in_two(initial_state: Tensor | None = None, **leaves: Tensor) -> tuple[Tensor, Tensor]:
        options: Problem = {"chunk_len": chunk_len}
        first, state = ssd(**part(leaves, slice(cut)), initial_state=initial_state, **options)
        second, state = ssd(**part(leaves, slice(cut, None)), initial_state=state, **options)
        return torch.cat([first, second], dim=1), state

    expected = with_gradients(ssd, problem, chunk_len=chunk_len)
    for name, value in with_gradients(in_two, problem).items():
        assert_same(value, expected[name], 1e-10, name)


@given(problems(min_t=2), chunk_lens, st.data())
def test_no_output_depends_on_a_later_token(problem, chunk_len, data):
    at = data.draw(st.integers(1, problem["x"].shape[1] - 1))
    before, _ = ssd(**problem, chunk_len=chunk_len)
    changed = {
        name: z.clone().index_fill_(1, torch.tensor([at]), 3.0)
        if name in {"x", "dt", "B", "C"}
        else z
        for name, z in problem.items()
    }
    after, _ = ssd(**changed, chunk_len=chunk_len)
    assert torch.equal(after[:, :at], before[:, :at])

    leaves = {name: z.clone().requires_grad_() for name, z in problem.items()}
    ssd(**leaves, chunk_len=chunk_len)[0][:, :at].sum().backward()
    for name in ("x", "dt", "B", "C"):
        gradient = leaves[name].grad
        assert gradient is not None
        assert not gradient[:, at:].any(), f"gradient of {name}"


@given(problems(min_t=2), st.data())
def test_the_past_reaches_the_future_through_d_state_numbers(problem, data):
    cut = data.draw(st.integers(1, problem["x"].shape[1] - 1))
    M = ssd_matrix(*(problem[name] for name in ("dt", "A", "B", "C")))
    singular = torch.linalg.svdvals(M[..., cut:, :cut])
    n = problem["B"].shape[-1]
    assert (singular[..., n:] <= 1e-13 * singular[..., :1]).all()


@given(problems(), st.data())
def test_decay_multiplies_along_the_way(problem, data):
    t = problem["x"].shape[1]
    s, k, later = sorted(data.draw(st.tuples(*[st.integers(0, t - 1)] * 3)))
    log_L = segment_sums((problem["dt"] * problem["A"]).mT)
    L = log_L.exp()
    assert ((L >= 0) & (L <= 1)).all()
    # 0 < L while exp does not underflow.
    assert (L > 0).equal(log_L > -745.13)
    assert not L.triu(1).any()
    # Relative errors of exp are absolute errors of its argument, some 1e-16 of it.
    product = L[..., later, k] * L[..., k, s]
    torch.testing.assert_close(L[..., later, s], product, rtol=1e-11, atol=1e-300)


@given(problems(state=False), st.data())
def test_an_entry_of_the_matrix_is_a_write_for_a_read(problem, data):
    t = problem["x"].shape[1]
    read, write = data.draw(st.integers(0, t - 1)), data.draw(st.integers(0, t - 1))
    x, C = problem["x"], problem["C"]
    dt, log_decay = problem["dt"], problem["dt"] * problem["A"]
    M = matrix_from_decay(dt, log_decay, problem["B"], C)
    M[..., read, write] = 0
    writes = state_writes(x, dt, problem["B"])
    writes[:, write] = 0
    expected = read_states(scan_states(writes, log_decay), x, C)[:, read]
    actual = torch.einsum("bhs,bshp->bhp", M[..., read, :], x)
    scale = largest(ssd_recurrent(x, dt, problem["A"], problem["B"], C)[0])
    assert largest(actual - expected) <= 1e-12 * scale
