"""The delta rule and its relatives: chunks, matrix and single tokens are one recurrence."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.ops.delta import delta, delta_loop, delta_matrix, delta_states, delta_step

Problem = dict[str, Any]  # arguments of `delta` by name
TOKENS = {"q", "k", "v", "log_decay", "match", "erase"}
chunk_lens = st.integers(1, 48)


@st.composite
def problems(draw, min_t: int = 1, state: bool = True) -> Problem:
    """Draw structure and fill it in fp64: all kinds of decay and of correction.

    Decays go from none to −∞, at a part of the tokens or at all; keys may repeat, and what is taken
    away of what a key held goes up to twice that.
    """
    b, t = draw(st.integers(1, 2)), draw(st.integers(min_t, 40))
    h, p, n = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    problem = {"q": normal(b, t, h, n), "k": normal(b, t, h, n), "v": normal(b, t, h, p)}
    channels = draw(st.sampled_from([None, (), (n,)]))
    if channels is not None:
        log_decay = -(2.0 ** draw(st.integers(-12, 12))) * uniform(b, t, h, *channels)
        forgetful = uniform(b, t, h, *channels) < draw(st.sampled_from([0.0, 0.1, 1.0]))
        problem["log_decay"] = log_decay.masked_fill(forgetful, -torch.inf)
    correction = draw(st.sampled_from(["none", "key", "another"]))
    if correction != "none":
        match = F.normalize(normal(b, t, h, n), dim=-1)
        if draw(st.booleans()):  # as few keys as fit
            match = match[:, torch.arange(t) % min(t, draw(st.integers(1, 2)))]
        lowest = draw(st.sampled_from([0.0, 1.999]))
        rate = lowest + (2 - lowest) * uniform(b, t, h, 1)
        problem["match"] = match
        problem["k" if correction == "key" else "erase"] = rate * match
        if correction == "another" and draw(st.booleans()):
            problem["erase"] = rate * F.normalize(normal(b, t, h, n), dim=-1)
    if state and draw(st.booleans()):
        problem["initial_state"] = normal(b, h, n, p)
    return problem


def assert_same(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-10) -> None:
    """Compare to a part of the largest entry: cancellation spares no small one."""
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    # A log-decay below −128 counts as −128, whose exp is 3e-56.
    assert error <= tolerance * scale + 1e-40, f"{name} is off by {error:.1e} of {scale:.1e}"


def with_gradients(form, problem: Problem) -> dict[str, Tensor]:
    """Return y, the last state, and the gradients of a sum over both with unlike weights."""
    leaves = {name: z.clone().requires_grad_() for name, z in problem.items()}
    y, state = form(**leaves)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(z.shape, generator=generator, dtype=torch.float64) for z in (y, state)]
    ((y * weights[0]).sum() + (state * weights[1]).sum()).backward()
    gradients = {f"gradient of {name}": z.grad for name, z in leaves.items()}
    return {"y": y.detach(), "state": state.detach(), **gradients}


def part(problem: Problem, span: slice) -> Problem:
    """Return a stretch of tokens."""
    return {name: z[:, span] if name in TOKENS else z for name, z in problem.items()}


def assert_all_same(form, problem: Problem) -> None:
    """Hold a form's values and gradients against the loop's."""
    expected, actual = with_gradients(delta_loop, problem), with_gradients(form, problem)
    for name, value in expected.items():
        assert_same(actual[name], value, name)


@given(problems(), chunk_lens)
def test_chunks_are_the_loop_in_values_and_gradients(problem, chunk_len):
    assert_all_same(lambda **leaves: delta(**leaves, chunk_len=chunk_len), problem)


@given(problems(state=False))
def test_the_matrix_is_the_loop_in_values_and_gradients(problem):
    def multiply(q, k, v, **options):
        M = delta_matrix(q, k, **options)
        return torch.einsum("bhts,bshp->bthp", M, v), torch.zeros(1, dtype=v.dtype)

    def loop(**leaves):
        return delta_loop(**leaves)[0], torch.zeros(1, dtype=torch.float64)

    expected, actual = with_gradients(loop, problem), with_gradients(multiply, problem)
    for name, value in expected.items():
        assert_same(actual[name], value, name)


@given(problems(state=False), st.data())
def test_rows_of_the_matrix_are_those_of_the_whole(problem, data):
    t = problem["q"].shape[1]
    first, last = sorted(data.draw(st.tuples(st.integers(0, t - 1), st.integers(0, t - 1))))
    del problem["v"]
    M = delta_matrix(**problem)
    assert M.shape[-2:] == (t, t)
    assert not M.triu(1).any()
    some = delta_matrix(**problem, rows=slice(first, last + 1))
    assert some.shape == M[..., first : last + 1, :].shape
    assert (some - M[..., first : last + 1, :]).abs().max() <= 1e-12 * M.abs().max()


@given(problems())
def test_tokens_one_by_one_are_the_whole_row(problem):
    def step_by_step(q, k, v, log_decay=None, match=None, erase=None, initial_state=None):
        b, t, h, n = q.shape
        state = q.new_zeros(b, h, n, v.shape[-1]) if initial_state is None else initial_state
        outputs = []
        for i in range(t):
            terms = (None if z is None else z[:, i] for z in (log_decay, match, erase))
            y, state = delta_step(q[:, i], k[:, i], v[:, i], *terms, state=state)
            outputs.append(y)
        return torch.stack(outputs, 1), state

    assert_all_same(step_by_step, problem)


@given(problems())
def test_states_end_in_the_last_and_give_the_outputs(problem):
    y, last = delta(**problem)
    written = {name: z for name, z in problem.items() if name != "q"}
    states = delta_states(**written)
    assert_same(last, states[:, -1], "state")
    assert_same(y, torch.einsum("bthnp,bthn->bthp", states, problem["q"]), "y")


@given(problems(min_t=2), chunk_lens, st.data())
def test_a_state_is_carried_over_any_split(problem, chunk_len, data):
    cut = data.draw(st.integers(1, problem["q"].shape[1] - 1))

    def in_two(initial_state: Tensor | None = None, **leaves: Tensor) -> tuple[Tensor, Tensor]:
        first, second = part(leaves, slice(cut)), part(leaves, slice(cut, None))
        y, state = delta(**first, initial_state=initial_state, chunk_len=chunk_len)
        rest, state = delta(**second, initial_state=state, chunk_len=chunk_len)
        return torch.cat([y, rest], 1), state

    assert_all_same(in_two, problem)


@given(problems(min_t=2), chunk_lens, st.data())
def test_no_output_depends_on_a_later_token(problem, chunk_len, data):
    at = data.draw(st.integers(1, problem["q"].shape[1] - 1))
    before, _ = delta(**problem, chunk_len=chunk_len)
    changed = {
        name: torch.cat([z[:, :at], 0.5 * z[:, at:]], 1) if name in TOKENS else z
        for name, z in problem.items()
    }
    after, _ = delta(**changed, chunk_len=chunk_len)
    assert torch.equal(after[:, :at], before[:, :at])

    leaves = {name: z.clone().requires_grad_() for name, z in problem.items()}
    delta(**leaves, chunk_len=chunk_len)[0][:, :at].sum().backward()
    for name in TOKENS & leaves.keys():
        gradient = leaves[name].grad
        assert gradient is not None
        assert not gradient[:, at:].any(), f"gradient of {name}"


@given(problems(state=False))
def test_a_key_holds_what_was_written_last(problem):
    """With β = 1 and unit keys without decay, the key that was just written reads its value."""
    key = F.normalize(problem["k"], dim=-1)
    y, _ = delta(q=key, k=key, v=problem["v"], match=key)
    assert_same(y, problem["v"], "y")
