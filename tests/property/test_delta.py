"""The delta rule: one function in several forms, whatever its options, shapes and strengths."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.ops.delta import delta, delta_loop, delta_matrix, delta_states
from tests.delta_cases import CORRECTIONS, DECAYS, differentiate, draw_problem, find_errors

Problem = dict[str, Any]
chunk_lens = st.sampled_from([1, 2, 4, 7, 16, 64])


@st.composite
def problems(draw, dtype: torch.dtype = torch.float64, min_t: int = 1) -> Problem:
    heads = draw(st.integers(1, 3))
    writes = draw(st.sampled_from([None, 1, 2, 3]))
    problem = draw_problem(
        t=draw(st.integers(min_t, 40)),
        decay=draw(st.sampled_from(DECAYS)),
        correction=draw(st.sampled_from(CORRECTIONS)),
        writes=writes,
        own=draw(st.booleans()),
        groups=draw(st.sampled_from([1, heads])),
        heads=heads,
        seed=draw(st.integers(0, 2**32)),
        strength=10.0 ** draw(st.integers(-4, 3)),
        forgets=draw(st.sampled_from([0.0, 0.2, 1.0])),
        b=draw(st.integers(1, 2)),
        n=draw(st.integers(2, 5)),
        p=draw(st.integers(1, 4)),
        dtype=dtype,
    )
    if draw(st.booleans()):
        del problem["initial_state"]
    return problem


@given(problems(), chunk_lens)
def test_chunks_are_the_token_loop(problem, chunk_len):
    expected = differentiate(delta_loop, problem)
    errors = find_errors(differentiate(delta, problem, chunk_len=chunk_len), expected)
    # Where all is forgotten a gradient of a decay is 0 but for roundings.
    small = {name for name, z in expected.items() if z.abs().max() < 1e-12}
    assert all(error <= 1e-11 for name, error in errors.items() if name not in small), errors


@given(problems(torch.float32))
def test_fp32_is_exact_to_rounding(problem):
    exact: Problem = {
        name: z.double() if isinstance(z, Tensor) else z for name, z in problem.items()
    }
    for actual, expected in zip(delta(**problem), delta_loop(**exact), strict=True):
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@given(problems(min_t=2), st.data())
def test_a_row_can_be_computed_in_parts(problem, data):
    y, state = delta(**problem)
    t = problem["q"].shape[1]
    middle = data.draw(st.integers(1, t - 1))
    kept = {name: problem[name] for name in ("match_before_decay",) if name in problem}
    start = problem.pop("initial_state", None)
    tokens = {name: z for name, z in problem.items() if name not in kept}
    parts = []
    for part in (slice(middle), slice(middle, t)):
        of_part = {name: z[:, part] for name, z in tokens.items()}
        read, start = delta(**of_part, **kept, initial_state=start)
        parts.append(read)
    tolerance = 1e-11 * max(y.abs().max(), state.abs().max())
    assert (torch.cat(parts, 1) - y).abs().max() <= tolerance
    assert (start - state).abs().max() <= tolerance


@given(problems())
def test_the_matrix_is_causal_and_gives_what_is_read(problem):
    problem.pop("initial_state", None)
    y, _ = delta(**problem)
    v = problem.pop("v")
    t, h = y.shape[1:3]
    M = delta_matrix(**problem, n_heads=h).flatten(3)
    v = v.reshape(len(v), -1, *v.shape[-2:]).transpose(1, 2)
    assert M.unflatten(-1, (t, -1)).sum(-1).triu(1).abs().max() == 0
    assert ((M @ v).transpose(1, 2) - y).abs().max() <= 1e-11 * y.abs().max().clamp(min=1e-9)


@given(problems(), st.data())
def test_positions_are_read_from_their_states(problem, data):
    problem.pop("own", None)  # it reads the state before a token too
    t, rows = problem["q"].shape[1], len(problem["q"])
    some = data.draw(st.permutations(range(t)))[: data.draw(st.integers(1, t))]
    at = torch.tensor(some).expand(rows, -1)
    q = problem.pop("q")[:, some]
    states = delta_states(**problem, at=at)
    h = states.shape[2]
    expected = torch.einsum("bqhnp,bqhn->bqhp", states, q.repeat_interleave(h // q.shape[2], 2))
    y, _ = delta(q, **problem, at=at)
    assert (y - expected).abs().max() <= 1e-11 * states.abs().max()
