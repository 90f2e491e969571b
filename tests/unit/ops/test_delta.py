"""The delta rule by example: its forms agree, in precision, memory and second derivatives."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.ops.delta import delta, delta_loop, delta_matrix, delta_states, delta_step
from lab.ops.ssd import ssd
from tests.delta_cases import differentiate, draw_problem, find_errors, list_options

OPTIONS = list_options()
NAMES = [" ".join(f"{value}" for value in options.values()) for options in OPTIONS]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=NAMES)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"off by {error:.1e} of the largest"


@each_option
@pytest.mark.parametrize("t", [1, 5, 21])
@pytest.mark.parametrize("groups", [1, 2])
def test_chunks_are_the_token_loop(options, t, groups):
    problem = draw_problem(t, groups=groups, **options)
    expected = differentiate(delta_loop, problem)
    for chunk_len in (1, 8, 64):
        errors = find_errors(differentiate(delta, problem, chunk_len=chunk_len), expected)
        assert max(errors.values()) <= 1e-12, errors


@each_option
def test_token_loop_is_the_formula(options):
    """Whole matrices (I − e mᵀ) diag(a), multiplied as they are written."""
    problem = draw_problem(4, b=1, heads=1, groups=1, forgets=0.0, **options)
    y, last = delta_loop(**problem)
    k, v = (problem[name][0].reshape(4, -1, problem[name].shape[-1]) for name in ("k", "v"))
    c = problem["match"][0].reshape(k.shape) if "match" in problem else torch.zeros_like(k)
    b = problem["erase"][0].reshape(k.shape) if "erase" in problem else k
    state = problem["initial_state"][0, 0]
    for t in range(4):
        a = torch.eye(5, dtype=torch.float64)
        if "log_decay" in problem:
            a = a * problem["log_decay"][0, t].exp().reshape(-1)
        q = problem["q"][0, t, 0]
        before = state
        for j in range(k.shape[1]):
            erase = torch.outer(b[t, j], c[t, j])
            if problem.get("match_before_decay") and j == 0:
                kept = a - erase
            else:
                kept = torch.eye(5, dtype=torch.float64) - erase
                kept = kept @ a if j == 0 else kept
            state = kept @ state + torch.outer(k[t, j], v[t, j])
        read = state.mT @ q
        if "own" in problem:
            read = before.mT @ q + problem["own"][0, t].flatten() @ v[t]
        assert_close(y[0, t, 0], read)
    assert_close(last[0, 0], state)


@each_option
@pytest.mark.parametrize("groups", [1, 2])
def test_matrix_gives_what_is_read(options, groups):
    problem = draw_problem(13, groups=groups, **options)
    del problem["initial_state"]
    expected, _ = delta_loop(**problem)
    v = problem.pop("v")
    M = delta_matrix(**problem, n_heads=2)
    several = v.ndim == 5
    assert M.shape == (2, 2, 13, 13, *v.shape[2:-2])
    flat, v = (M.flatten(3), v.flatten(1, 2)) if several else (M, v)
    assert_close((flat @ v.transpose(1, 2)).transpose(1, 2), expected)
    assert flat.unflatten(-1, (13, -1)).sum(-1).triu(1).abs().max() == 0
    assert_close(delta_matrix(**problem, n_heads=2, rows=slice(4, 9)), M[:, :, 4:9])


@each_option
def test_reading_at_some_positions(options):
    problem = draw_problem(21, **options)
    y, state = delta_loop(**problem)
    at = torch.tensor([[20, 3, 7], [0, 9, 8]])
    index = at[..., None, None]
    problem["q"] = problem["q"].take_along_dim(index, 1)
    if "own" in problem:
        problem["own"] = torch.stack([z[i] for z, i in zip(problem["own"], at, strict=True)])
    for form in (delta, delta_loop):
        part, last = form(**problem, at=at)
        assert_close(part, y.take_along_dim(index, 1))
        assert_close(last, state)


@each_option
def test_states_are_those_of_steps(options):
    problem = draw_problem(70, **options)
    y, _ = delta_loop(**problem)
    own, state = problem.pop("own", None), problem["initial_state"]
    q, before = problem.pop("q"), bool(problem.pop("match_before_decay", False))
    states = delta_states(**problem, match_before_decay=before)
    at = torch.tensor([[69, 3, 3, 64], [0, 9, 63, 8]])
    some = delta_states(**problem, match_before_decay=before, at=at)
    assert_close(some, states.take_along_dim(at[..., None, None, None], 1))
    del problem["initial_state"]
    for t in range(70):
        token = {name: z[:, t] for name, z in problem.items()}
        token = {"log_decay": None, "match": None, "erase": None, **token}
        read, state = delta_step(
            q[:, t],
            **token,
            state=state,
            match_before_decay=before,
            own=None if own is None else own[:, t],
        )
        assert_close(read, y[:, t])
        assert_close(state, states[:, t])


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("correction", ["none", "own key", "apart", "before decay"])
@pytest.mark.parametrize("strength", [0.0, 1e-3, 0.1, 3.0, 100.0])
@pytest.mark.parametrize("t", [1, 63, 300])
def test_fp32_is_exact_to_rounding(decay, correction, strength, t):
    """Decays from none to all, with tokens that forget all among them."""
    sizes = {"decay": decay, "correction": correction, "strength": strength, "n": 16, "p": 8}
    single = draw_problem(t, dtype=torch.float32, **sizes)
    exact: dict[str, Any] = {
        name: z.double() if isinstance(z, Tensor) else z for name, z in single.items()
    }
    y, state = delta(**single)
    expected, last = delta_loop(**exact)
    assert_close(y, expected, 1e-5)
    assert_close(state, last, 1e-5)
    errors = find_errors(differentiate(delta, single), differentiate(delta_loop, exact))
    assert max(errors.values()) <= 2e-5, errors


def draw_repeated_keys(n_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The equations of a chunk are then as far from the identity as they can be."""
    generator = torch.Generator().manual_seed(0)
    keys = F.normalize(torch.randn(n_keys, 16, generator=generator), dim=-1)
    k = keys[torch.randint(n_keys, (1, 300, 1), generator=generator)]
    q, v = (torch.randn(1, 300, 1, width, generator=generator) for width in (16, 8))
    return q, k, v


def read_exactly(q: Tensor, k: Tensor, v: Tensor, beta: float) -> Tensor:
    q, k, v = (z.double() for z in (q, k, v))
    return delta_loop(q, beta * k, v, match=k)[0]


@pytest.mark.parametrize("beta", [0.1, 1.0, 1.5, 1.9, 1.99])
@pytest.mark.parametrize("n_keys", [1, 3])
def test_fp32_with_repeated_keys(beta, n_keys):
    q, k, v = draw_repeated_keys(n_keys)
    beta = torch.tensor(beta).item()  # as fp32 has it
    assert_close(delta(q, beta * k, v, match=k)[0], read_exactly(q, k, v, beta), 1e-5)


@pytest.mark.parametrize("n_keys", [1, 3])
def test_fp32_where_nothing_is_forgotten(n_keys):
    """At β = 2 what one key holds only changes its sign, and roundings of β add up.

    So the error is held against what the last digit of β does to the exact result.
    """
    q, k, v = draw_repeated_keys(n_keys)
    expected = read_exactly(q, k, v, 2.0)
    inherent = (read_exactly(q, k, v, 2 * (1 + 2**-24)) - expected).abs().max()
    error = (delta(q, 2 * k, v, match=k)[0] - expected).abs().max()
    assert error <= 4 * inherent


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_fp32_over_4096_tokens(decay):
    sizes = {"decay": decay, "strength": 0.01, "forgets": 0.001, "b": 1, "n": 16}
    single = draw_problem(4096, correction="own key", dtype=torch.float32, **sizes)
    exact = {name: z.double() for name, z in single.items()}
    for actual, expected in zip(delta(**single), delta_loop(**exact), strict=True):
        assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_decay_of_zero(decay, dtype):
    """log 0 = −∞: values and gradients are those of a sequence that begins there."""
    problem = draw_problem(12, decay, "own key", forgets=0.0, dtype=dtype)
    problem["log_decay"][:, 7] = -torch.inf
    whole = differentiate(delta, problem)
    assert all(z.isfinite().all() for z in whole.values()), whole
    exact = {name: z.double() for name, z in problem.items()}
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    errors = find_errors(whole, differentiate(delta_loop, exact))
    assert max(errors.values()) <= tolerance, errors
    assert whole["gradient of initial_state"].abs().max() > 0  # tokens before read it
    del problem["initial_state"]
    later, _ = delta(**{name: z[:, 7:] for name, z in problem.items()})
    assert_close(whole["y"][:, 7:], later, tolerance)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("correction", ["none", "own key", "before decay"])
def test_first_and_second_derivatives(decay, correction):
    problem = draw_problem(5, decay, correction, b=1, groups=1, heads=1, n=2, p=2, forgets=0.0)
    before = problem.pop("match_before_decay", False)
    names = list(problem)

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        arguments = dict(zip(names, given, strict=True))
        return delta(**arguments, match_before_decay=before, chunk_len=4)

    inputs = [z.detach().requires_grad_() for z in problem.values()]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("correction", ["none", "own key", "apart"])
def test_memory_is_linear_in_time(decay, correction):
    def count_saved_bytes(t: int) -> int:
        problem = draw_problem(t, decay, correction)
        before = problem.pop("match_before_decay", False)
        leaves = {name: z.requires_grad_() for name, z in problem.items()}
        stored: dict[int, int] = {}

        def pack(z: Tensor) -> Tensor:
            storage = z.untyped_storage()
            stored[storage.data_ptr()] = storage.nbytes()
            return z

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda z: z):
            held = delta(**leaves, match_before_decay=before)
        assert held[0].requires_grad
        return sum(stored.values())

    once, twice = count_saved_bytes(512), count_saved_bytes(1024)
    assert 1.8 * once < twice < 2.05 * once


def test_state_space_duality_is_a_case():
    generator = torch.Generator().manual_seed(0)
    x, dt = torch.randn(2, 70, 4, 3, generator=generator), torch.rand(2, 70, 4, generator=generator)
    B, C = torch.randn(2, 2, 70, 2, 5, generator=generator).double()
    A, x, dt = -torch.ones(4).double(), x.double(), dt.double()
    y, state = ssd(x, dt, A, B, C)
    read, last = delta(C, B, dt[..., None] * x, dt * A)
    assert_close(read, y)
    assert_close(last.mT, state)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_low_precision_and_autocast(decay):
    problem = draw_problem(40, decay, "own key", dtype=torch.bfloat16)
    y, state = delta(**problem)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    single = {name: z.float() for name, z in problem.items()}
    with torch.autocast("cpu", torch.bfloat16):
        cast, cast_state = delta(**single)
    expected, last = delta_loop(**single)
    assert_close(cast, expected, 1e-5)
    assert_close(cast_state, last, 1e-5)
    assert_close(y.float(), expected, 2**-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 5, 2, 4)}, "q [b q g n] is [2, 5, 2, 4], must be [2, 5, 2, 5]"),
        ({"v": (2, 6, 2, 3)}, "v [b t h p] is [2, 6, 2, 3], must be [2, 5, 2, 3]"),
        ({"k": (2, 5, 3, 5)}, "k has g=3 groups, must divide v's h=2 heads"),
        ({"k": (2, 0, 2, 5)}, "k has t=0 tokens, must have at least 1"),
        ({"erase": (2, 5, 2, 5)}, "erase needs a match"),
        ({"match": (2, 4, 2, 5)}, "match [b t g n] is [2, 4, 2, 5], must be [2, 5, 2, 5]"),
        ({"log_decay": (2, 5, 3)}, "log_decay is [2, 5, 3], must be [2, 5, 2] or [2, 5, 2, 5]"),
        ({"initial_state": (2, 2, 3, 5)}, "is [2, 2, 3, 5], must be [2, 2, 5, 3]"),
        ({"own": (2, 4, 2)}, "own [b q h] is [2, 4, 2], must be [2, 5, 2]"),
        ({"at": [[0], [1]]}, "q [b q g n] is [2, 5, 2, 5], must be [2, 1, 2, 5]"),
        ({"at": [[0, 1, 2, 3, 5]] * 2}, "at must be positions in [0, 5)"),
        ({"at": [[0, 1, 2, 3, 3]] * 2}, "at gives a position of a row twice"),
        ({"chunk_len": 0}, "chunk_len=0 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, unchecked):
    problem = draw_problem(5)
    for name, value in change.items():
        if isinstance(value, tuple):
            value = torch.zeros(value, dtype=torch.float64)
        problem[name] = torch.tensor(value) if isinstance(value, list) else value
    with pytest.raises(ValueError, match=re.escape(message)):
        delta(**problem)
