"""SSD by example: chunk borders, precision, what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.ops import ssd_chunked as ssd_chunked_module
from lab.ops.ssd import BACKENDS, ssd, ssd_step
from lab.ops.ssd_chunked import CHUNK_LEN, ssd_chunked
from lab.ops.ssd_decay import decay_matrix, segment_sums
from lab.ops.ssd_forms import (
    read_states,
    scan_states,
    ssd_matrix,
    ssd_recurrent,
    state_writes,
)
from tests.normal import draw_normal


def problem(b: int = 2, t: int = 13, h: int = 4, p: int = 3, g: int = 2, n: int = 5):
    """x, dt, A, B, C, D that remember a few tokens."""
    return (
        draw_normal(b, t, h, p),
        draw_normal(b, t, h, seed=1).sigmoid(),
        -draw_normal(h, seed=2).exp(),
        draw_normal(b, t, g, n, seed=3),
        draw_normal(b, t, g, n, seed=4),
        draw_normal(h, seed=5),
    )


@pytest.mark.parametrize("g", [1, 2, 4])
@pytest.mark.parametrize("chunk_len", [1, 2, 4, 13, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_chunk_gives_the_recurrence(g, chunk_len, dtype):
    inputs = [z.to(dtype) for z in problem(g=g)]
    y, state = ssd(*inputs, chunk_len=chunk_len, initial_state=draw_normal(2, 4, 3, 5).to(dtype))
    exact = [z.double() for z in inputs]
    expected, last = ssd_recurrent(*exact, initial_state=draw_normal(2, 4, 3, 5).to(dtype).double())
    # A few hundred roundings of numbers below 30, near all of random sign.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=10 * tolerance)
    torch.testing.assert_close(state.double(), last, rtol=0, atol=tolerance)


def test_backends():
    inputs = problem()
    assert torch.equal(ssd(*inputs)[0], ssd(*inputs, backend="torch")[0])
    with pytest.raises(ValueError, match="backend='triton': must be one of auto, torch"):
        ssd(*inputs, backend="triton")


def test_low_precision_computes_in_fp32():
    inputs = [z.bfloat16() for z in problem(t=300)]
    y, state = ssd(*inputs, chunk_len=64)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    expected = ssd_recurrent(*(z.double() for z in inputs))[0]
    # Rounding to bf16 is off by 2^-8 of an entry; fp32 adds next to nothing.
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)


def test_gradients_of_gradients_equal_finite_differences():
    given = (*problem(b=1, t=5, h=2, p=2, g=1, n=2), draw_normal(1, 2, 2, 2, seed=6))

    def from_state(x, dt, A, B, C, D, state):
        return ssd(x, dt, A, B, C, D, chunk_len=2, initial_state=state)

    torch.autograd.gradgradcheck(from_state, [z.requires_grad_() for z in given])


def test_kernels_of_others_refuse_a_second_derivative(monkeypatch):
    monkeypatch.setitem(BACKENDS, "kernel", BACKENDS["torch"])
    x, dt, A, B, C, D = problem()
    y, _ = ssd(x.requires_grad_(), dt, A, B, C, D, backend="kernel")
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="backend='kernel' has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def gradients(form: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> list[Tensor]:
    """y, the last state, and every gradient of a sum over both with unlike weights."""
    leaves = tuple(z.detach().clone().requires_grad_() for z in given)
    outputs = form(*leaves)
    loss = torch.stack([(z * draw_normal(*z.shape, seed=9)).sum() for z in outputs]).sum()
    return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("at_once", [1, 16, 1000])
@pytest.mark.parametrize("t", [1, CHUNK_LEN, 3 * CHUNK_LEN + 7])
def test_any_number_of_chunks_at_once_gives_the_recurrence(monkeypatch, at_once, t):
    monkeypatch.setattr(ssd_chunked_module, "CHUNKS_AT_ONCE", at_once)
    leaves = (*problem(t=t), draw_normal(2, 4, 3, 5, seed=6))

    def from_state(x, dt, A, B, C, D, state):
        return ssd(x, dt, A, B, C, D, initial_state=state)

    for actual, expected in zip(
        gradients(from_state, *leaves),
        gradients(ssd_recurrent, *leaves),
        strict=True,
    ):
        error = (actual - expected).abs().max()
        assert error <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -1e4, -1e30])
def test_any_log_decay(log_decay):
    x, dt, _, B, C, D = problem()

    def chunked(x, dt, log_decay, B, C, D):
        return ssd_chunked(x, dt, log_decay, B, C, D, 4, None)

    def recurrent(x, dt, log_decay, B, C, D):
        states = scan_states(state_writes(x, dt, B), log_decay)
        return read_states(states, x, C, D), states[:, -1]

    leaves = (x, dt, torch.full_like(dt, log_decay), B, C, D)
    for actual, expected in zip(
        gradients(chunked, *leaves), gradients(recurrent, *leaves), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_a_token_of_no_step_neither_decays_nor_writes():
    x, dt, A, B, C, D = problem()
    dt[:, 3:9] = 0
    kept = [0, 1, 2, 9, 10, 11, 12]
    y, state = ssd(x, dt, A, B, C, D, chunk_len=4)
    some, last = ssd(x[:, kept], dt[:, kept], A, B[:, kept], C[:, kept], D, chunk_len=4)
    torch.testing.assert_close(y[:, kept], some)
    torch.testing.assert_close(state, last)


@pytest.mark.filterwarnings("ignore")  # PyTorch 2.13's compiler warns of what it does itself
@pytest.mark.usefixtures("unchecked")  # the compiler cannot trace the tests' type checker
def test_compiles():
    shapes = [(2, 13, 4, 3), (2, 13, 4), (4,), (2, 13, 2, 5), (2, 13, 2, 5)]
    generator = torch.Generator().manual_seed(0)
    x, dt, A, B, C = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [z.requires_grad_() for z in (x, dt.sigmoid(), -A.sigmoid(), B, C)]

    def run(*z):
        return ssd(*z, chunk_len=4)[0].square().sum()

    expected = torch.autograd.grad(run(*leaves), leaves)
    actual = torch.autograd.grad(torch.compile(run, backend="aot_eager")(*leaves), leaves)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("g", [1, 2, 4])
def test_steps_are_the_recurrence(g, skip):
    x, dt, A, B, C, D = problem(g=g)
    D = D if skip else None
    state = draw_normal(2, 4, 3, 5, seed=6)
    expected, last = ssd_recurrent(x, dt, A, B, C, D, state)
    for t in range(x.shape[1]):
        y, state = ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], D, state)
        torch.testing.assert_close(y, expected[:, t])
    torch.testing.assert_close(state, last)


def test_a_step_refuses_a_state_of_another_batch(unchecked):
    x, dt, A, B, C, D = problem()
    with pytest.raises(ValueError, match=r"initial_state \[b h p n\] is \[3, 4, 3, 5\]"):
        ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, draw_normal(3, 4, 3, 5))


def test_segment_sums_are_a_hundred_times_more_exact_than_differences():
    log_decay = -draw_normal(1, 2048).exp().float()
    exact = segment_sums(log_decay.double())
    causal = torch.ones(2048, 2048).tril(-1).bool()

    def error(log_L: Tensor) -> float:
        return ((log_L - exact) / exact)[0, causal].abs().max().item()

    running = log_decay.cumsum(-1)
    assert error(segment_sums(log_decay)) < 1e-5
    assert error(running[..., :, None] - running[..., None, :]) > 100 * error(
        segment_sums(log_decay)
    )
    L = decay_matrix(log_decay).double()
    # An error relative to the exponent; what underflows is lost whole.
    bound = 1e-5 * exact.exp() * (1 - exact.clamp(min=-1e3)) + 1e-37
    assert ((L - exact.exp()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [0, 3, 6])
def test_a_log_decay_that_is_not_a_number_reaches_nothing_earlier(k, dtype):
    log_decay = -draw_normal(2, 7).exp().to(dtype)
    log_decay[:, k] = torch.nan
    oracle, L = segment_sums(log_decay).exp(), decay_matrix(log_decay)
    torch.testing.assert_close(L[:, :k], oracle[:, :k])
    assert L[oracle.isnan()].isnan().all()


@pytest.mark.parametrize("strong", [-100.0, -1e4, -1e30, -torch.inf])
def test_a_strong_decay_costs_later_ones_no_digits(strong):
    log_decay = -1e-4 * draw_normal(3, CHUNK_LEN).exp().float()
    log_decay[:, [5, 20]] = strong
    exact = segment_sums(log_decay.double()).exp()
    torch.testing.assert_close(decay_matrix(log_decay).double(), exact, rtol=3e-7, atol=1e-37)
    running = log_decay.clamp(min=-1e4).cumsum(-1)
    differences = (running[..., :, None] - running[..., None, :]).exp().tril().double()
    assert (differences - exact).abs().max() > 3e-6


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("B", draw_normal(2, 13, 3, 5), "B has g=3 groups, must divide x's h=4 heads"),
        (
            "C",
            draw_normal(2, 13, 1, 5),
            r"C \[b t g n\] is \[2, 13, 1, 5\], must be \[2, 13, 2, 5\]",
        ),
        ("dt", draw_normal(2, 12, 4), r"dt \[b t h\] is \[2, 12, 4\], must be \[2, 13, 4\]"),
        ("A", draw_normal(1), r"A \[h\] is \[1\], must be \[4\]"),
        ("D", draw_normal(4, 3), r"D \[h\] is \[4, 3\], must be \[4\]"),
        ("initial_state", draw_normal(1, 4, 3, 5), r"\[1, 4, 3, 5\], must be \[2, 4, 3, 5\]"),
        ("chunk_len", 0, "chunk_len=0 must be at least 1"),
        ("x", draw_normal(2, 0, 4, 3), "x has t=0 tokens"),
    ],
)
def test_refuses(unchecked, name, value, message):
    arguments: dict[str, Any] = dict(zip(("x", "dt", "A", "B", "C", "D"), problem(), strict=True))
    with pytest.raises(ValueError, match=message):
        ssd(**(arguments | {name: value}))


@pytest.mark.parametrize(("b", "h", "t"), [(1, 1, 5), (2, 4, 1100), (8, 8, 300)])
def test_autocast_changes_nothing(b: int, h: int, t: int):
    """In every span of chunks, forward, backward and in a step: bf16 would be off by 4e-3."""
    generator = torch.Generator().manual_seed(0)

    def draw_normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    x, B, C = draw_normal(b, t, h, 4), draw_normal(b, t, 1, 4), draw_normal(b, t, 1, 4)
    dt, A = draw_normal(b, t, h).detach().sigmoid().requires_grad_(), -torch.ones(h)

    def results() -> list[Tensor]:
        y, state = ssd(x, dt, A, B, C, backend="torch")
        grads = torch.autograd.grad(y.sum() + state.sum(), [x, dt, B, C])
        after = ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], None, state)
        matrix = ssd_matrix(dt[:, :7], A, B[:, :7], C[:, :7])
        return [y, state, *grads, *after, matrix]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        actual = results()
    for mine, other in zip(actual, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other)


class OnGPU(Tensor):
    """Says that it is on a GPU, and is not."""

    is_cuda = True


@pytest.mark.parametrize(("kind", "spans"), [(Tensor, 8), (OnGPU, 2)])
def test_a_gpu_gets_more_chunks_at_once(kind, spans):
    x = torch.empty(4, 2048, 4, 64, device="meta").as_subclass(kind)
    found = ssd_chunked_module._list_spans(x, 64)
    assert len(found) == spans
    assert (found[0].start, found[-1].stop) == (0, 2048)
