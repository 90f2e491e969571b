"""Rotary positions on C and B: relative, exact to derived bounds, and the same in every SSD form.

Hypothesis draws structure, a seeded generator fills it. u is the unit roundoff of the dtype.
The bounds: an angle position·θ is off by at most 2u·θ·|position|, one u for θ's rounding and one
for the product's, or by nothing where θ = 1; turning a pair by an angle off by ε moves it by ε
times its norm. To this come the roundings of cos, sin, two products and a sum a channel, at most
10u for a pair of vectors, and n/2 u for the sum over pairs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, target
from hypothesis import strategies as st
from torch import Tensor

from lab.ops.rope import Layout, rotate, rotate_by_matrix
from lab.ops.ssd import ssd
from lab.ops.ssd_forms import repeat_groups, ssd_matrix, ssd_quadratic, ssd_recurrent

LONGEST = 131_072
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}

dtypes = st.sampled_from(list(UNIT_ROUNDOFF))
seeds = st.integers(0, 2**32)
positions = st.integers(0, LONGEST)
widths = st.sampled_from([2, 4, 6, 16, 64, 128])
kinds = st.sampled_from(["normal", "zeros", "one-hot", "aligned"])
exponents = st.integers(-20, 20)


@dataclass(frozen=True)
class Rotation:
    """What a model fixes once: how its vectors turn."""

    n: int
    base: float
    layout: Layout
    dtype: torch.dtype

    def __call__(self, x: Tensor, at: Tensor) -> Tensor:
        return rotate(x, at, self.base, self.layout)

    @property
    def u(self) -> float:
        return UNIT_ROUNDOFF[self.dtype]

    @property
    def theta(self) -> Tensor:
        return self.base ** (-torch.arange(0, self.n, 2, dtype=torch.float64) / self.n)

    def pair_norms(self, x: Tensor) -> Tensor:
        """Return the norm of each pair of channels, in fp64."""
        shape, axis = ((2, -1), -2) if self.layout == "half" else ((-1, 2), -1)
        return x.double().unflatten(-1, shape).norm(dim=axis)

    def turning_error(self, distance: Tensor | float) -> Tensor:
        """Return for each pair what angles of `distance` positions in all may be off by."""
        distance = torch.as_tensor(distance, dtype=torch.float64)[..., None]
        return 2 * self.u * self.theta.where(self.theta != 1, 0) * distance

    def bound(self, c: Tensor, b: Tensor, distance: Tensor | float) -> Tensor:
        """Bound the difference of two inner products, `distance` the sum of four positions."""
        rounding = 2 * self.u * (self.n / 2 + 10)
        each = self.pair_norms(c) * self.pair_norms(b)
        return (each * (self.turning_error(distance) + rounding)).sum(-1)


rotations = st.builds(
    Rotation,
    n=widths,
    base=st.sampled_from([2.0, 100.0, 10_000.0, 500_000.0]),
    layout=st.sampled_from(["half", "interleaved"]),
    dtype=dtypes,
)


def fill(shape: tuple[int, ...], seed: int, kind: str, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return contents of a kind, scaled by a power of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "one-hot":
        x = torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0)
    elif kind == "aligned":
        x = torch.ones_like(x)
    return (x * 2.0**exponent).to(dtype)


def assert_within(error: Tensor, bound: Tensor, name: str) -> None:
    """Hold errors against their bounds, and let hypothesis look for the worst ratio."""
    assert not error.isnan().any()
    assert (error[bound == 0] == 0).all()
    ratio = (error / bound)[bound > 0]
    worst = ratio.max().item() if ratio.numel() else 0.0
    target(worst, label=f"{name}: error / bound")
    assert worst <= 1


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return fill(shape, seed, "normal", 0, dtype)


@given(rotations, seeds, kinds, exponents, positions, positions, st.data())
def test_inner_product_depends_on_the_difference_of_positions(f, seed, kind, exponent, j, i, data):
    shift = data.draw(st.integers(0, min(i, j)))
    c = fill((1, 1, 1, f.n), seed, kind, exponent, f.dtype)
    b = fill((1, 1, 1, f.n), seed + 1, kind, 0, f.dtype)

    def inner(s: int) -> Tensor:
        return (f(c, torch.tensor([j - s])) * f(b, torch.tensor([i - s]))).sum()

    bound = f.bound(c, b, i + j + (i - shift) + (j - shift)).squeeze()
    assert_within((inner(0) - inner(shift)).double().abs(), bound, "relative")


@given(rotations, seeds, kinds, exponents, st.integers(2, 33), st.integers(0, LONGEST - 33))
def test_constant_content_is_toeplitz(f, seed, kind, exponent, t, start):
    c = fill((1, 1, 1, f.n), seed, kind, exponent, f.dtype)
    b = fill((1, 1, 1, f.n), seed + 1, kind, 0, f.dtype)
    at = start + torch.arange(t)
    scores = f(c.expand(1, t, 1, -1), at)[0, :, 0] @ f(b.expand(1, t, 1, -1), at)[0, :, 0].T
    along_diagonals = (scores[1:, 1:] - scores[:-1, :-1]).double().abs()
    distance = 2.0 * (at[1:, None] + at[None, 1:] - 1)
    bound = f.bound(c.squeeze(), b.squeeze(), distance)
    assert_within(along_diagonals, bound, "Toeplitz")


@given(rotations, seeds, kinds, exponents, st.integers(-LONGEST, LONGEST), positions)
def test_rotations_compose(f, seed, kind, exponent, a, b):
    x = fill((1, 1, 1, f.n), seed, kind, exponent, f.dtype)
    twice = f(f(x, torch.tensor([b])), torch.tensor([a]))
    once = f(x, torch.tensor([a + b]))
    # Three turns of at most 6 roundings a pair: cos, sin, two products, the sum, √2 for a pair.
    error = f.turning_error(abs(a) + abs(b) + abs(a + b)) + 18 * f.u
    assert_within(f.pair_norms(twice - once), f.pair_norms(x) * error, "R_a R_b = R_{a+b}")


@given(rotations, seeds, kinds, exponents, positions)
def test_rotations_keep_norms_and_start_at_identity(f, seed, kind, exponent, at):
    x = fill((2, 1, 3, f.n), seed, kind, exponent, f.dtype)
    assert torch.equal(f(x, torch.tensor([0])), x)
    norms = f.pair_norms(x)
    change = (f.pair_norms(f(x, torch.tensor([at]))) - norms).abs()
    assert_within(change, 6 * f.u * norms, "norms")


@given(
    rotations, seeds, kinds, exponents, st.lists(positions, min_size=1, max_size=5), st.booleans()
)
def test_equals_the_explicit_matrix(f, seed, kind, exponent, at, by_row):
    x = fill((2, len(at), 3, f.n), seed, kind, exponent, f.dtype)
    where = torch.tensor(at)
    if by_row:
        where = torch.stack([where, where.flip(0)])
    exact = rotate_by_matrix(x.double(), where, f.base, f.layout)
    # The oracle's own θ, from Python's pow, is as far off as the op's: twice the angle's error in
    # fp64, next to nothing in fp32.
    error = 2 * f.turning_error(where)[..., None, :] + 6 * f.u
    difference = f.pair_norms(f(x, where).double() - exact)
    assert_within(difference, f.pair_norms(x) * error, "explicit matrix")


@given(rotations, st.sampled_from([torch.bfloat16, torch.float16]), seeds, kinds, positions)
def test_half_precision_turns_in_fp32(f, dtype, seed, kind, at):
    x, where = fill((2, 1, 3, f.n), seed, kind, 0, dtype), torch.tensor([at])
    assert torch.equal(f(x, where), f(x.float(), where).to(dtype))


@given(widths, dtypes, seeds, kinds, exponents, positions)
def test_layouts_are_a_permutation_of_channels_apart(n, dtype, seed, kind, exponent, at):
    x = fill((1, 1, 2, n), seed, kind, exponent, dtype)
    to_interleaved = torch.arange(n).view(2, -1).T.flatten()
    where = torch.tensor([at])
    half = rotate(x, where, layout="half")
    interleaved = rotate(x[..., to_interleaved], where, layout="interleaved")
    f = Rotation(n, 10_000.0, "interleaved", dtype)
    # Angles are the same; a strided kernel may round a product that a dense one fuses.
    error = f.pair_norms(interleaved - half[..., to_interleaved])
    assert_within(error, 4 * f.u * f.pair_norms(x[..., to_interleaved]), "layouts")


@given(st.sampled_from([4, 16, 64]), seeds, st.integers(1, 64))
def test_mixed_layouts_are_not_relative(n, seed, shift):
    c, b = normal(1, 8, 1, n, seed=seed), normal(1, 8, 1, n, seed=seed + 1)
    at = torch.arange(8)

    def scores(start: int) -> Tensor:
        turned_c = rotate(c, at + start, layout="half")[0, :, 0]
        return turned_c @ rotate(b, at + start, layout="interleaved")[0, :, 0].T

    assert (scores(shift) - scores(0)).abs().max() > 1e-3


@given(rotations, seeds, st.integers(1, 3), st.integers(1, 4), positions)
def test_rotation_commutes_with_repeating_groups(f, seed, g, heads_a_group, at):
    B = normal(2, 1, g, f.n, seed=seed, dtype=f.dtype)
    h, where = g * heads_a_group, torch.tensor([at])
    error = f.pair_norms(f(repeat_groups(B, h), where) - repeat_groups(f(B, where), h))
    assert_within(error, 4 * f.u * f.pair_norms(repeat_groups(B, h)), "groups")


# Negative controls: what is not relative must not pass for it.


@given(seeds, st.integers(4, 12))
def test_learned_absolute_positions_are_not_toeplitz(seed, t):
    n = 16
    c, b = normal(n, seed=seed), normal(n, seed=seed + 1)
    table = normal(t, n, seed=seed + 2)
    scores = (c + table) @ (b + table).T
    assert (scores[1:, 1:] - scores[:-1, :-1]).abs().max() > 1e-3


@given(seeds, st.integers(4, 12))
def test_constant_content_is_toeplitz_for_constant_dt_only(seed, t):
    n = 16
    at = torch.arange(t)
    C, B = (rotate(normal(1, 1, 1, n, seed=seed + i).expand(1, t, 1, n), at) for i in (0, 1))
    constant, varying = torch.full((1, t, 1), 0.3).double(), 0.3 * normal(1, t, 1, seed=seed).exp()

    def departure(dt: Tensor) -> float:
        M = ssd_matrix(dt, torch.tensor([-1.0], dtype=torch.float64), B, C)[0, 0]
        return ((M[1:, 1:] - M[:-1, :-1]).abs().max() / M.abs().max()).item()

    assert departure(constant) < 1e-12
    assert departure(varying) > 1e-3


@given(seeds, st.integers(1, 100))
def test_a_base_that_follows_the_length_breaks_cached_keys(seed, more):
    """Dynamic NTK (erratum R6): relative within a call, not between a call and an older one."""
    n, trained, at = 16, 64, torch.arange(64 + more)
    q, k = normal(1, 1, 1, n, seed=seed), normal(1, len(at), 1, n, seed=seed + 1)

    def base(length: int) -> float:
        return 10_000.0 * max(1.0, 2 * length / trained - 1) ** (n / (n - 2))

    def scores(keys: Tensor, shift: int) -> Tensor:
        return (rotate(q, at[-1:] - shift, base(len(at))) * keys).sum(-1)

    fresh, shifted = (rotate(k, at - shift, base(len(at))) for shift in (0, 7))
    cached = rotate(k[:, :trained], at[:trained], base(trained))
    assert_same(scores(fresh, 0), scores(shifted, 7), 1e-10)
    assert (scores(cached, 0) - scores(fresh, 0)[:, :trained]).abs().max() > 1e-3


# SSD with turned C and B.


@st.composite
def turned_ssd(draw):
    """Inputs of SSD in fp64, C and B turned from a first position on, and how they were."""
    g, heads_a_group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    b, t, h, p = draw(st.integers(1, 2)), draw(st.integers(2, 20)), g * heads_a_group, 3
    n, seed, start = draw(st.sampled_from([2, 6])), draw(seeds), draw(st.integers(0, 4096))
    layout = draw(st.sampled_from(["half", "interleaved"]))
    x, D = normal(b, t, h, p, seed=seed), normal(h, seed=seed + 3)
    # A token is remembered for a few others: enough for what is carried to show.
    dt, A = normal(b, t, h, seed=seed + 1).sigmoid() / 2, -2 * normal(h, seed=seed + 2).sigmoid()
    B, C = normal(b, t, g, n, seed=seed + 4), normal(b, t, g, n, seed=seed + 5)
    return (x, dt, A, B, C, D), start, layout


def turn(inputs: tuple[Tensor, ...], start: int, layout: Layout) -> tuple[Any, ...]:
    x, dt, A, B, C, D = inputs
    at = start + torch.arange(x.shape[1])
    return x, dt, A, rotate(B, at, layout=layout), rotate(C, at, layout=layout), D


def assert_same(actual: Tensor, expected: Tensor, relative: float = 1e-12) -> None:
    """Compare to a part of the largest entry: cancellation spares no small one."""
    assert (actual - expected).abs().max() <= relative * max(1.0, expected.abs().max())


@given(turned_ssd(), st.integers(1, 9))
def test_all_forms_of_ssd_agree_under_rotation(case, chunk_len):
    turned = turn(*case)
    expected, state = ssd_recurrent(*turned)
    for y, last in (ssd_quadratic(*turned), ssd(*turned, chunk_len=chunk_len)):
        assert_same(y, expected)
        assert_same(last, state)


@given(turned_ssd(), st.integers(1, 9))
def test_ssd_does_not_see_where_positions_start(case, chunk_len):
    inputs, start, layout = case
    # An angle of 4,096 is rounded by 2^-41, so products of states by some 1e-12.
    here, there = (ssd(*turn(inputs, s, layout), chunk_len=chunk_len)[0] for s in (0, start))
    assert_same(here, there, 1e-10)


@given(turned_ssd(), st.data())
def test_split_and_carry_needs_offset_positions(case, data):
    inputs, start, layout = case
    t = inputs[0].shape[1]
    cut = data.draw(st.integers(1, t - 1))

    def part(tensors: tuple[Tensor, ...], span: slice) -> tuple[Tensor, ...]:
        x, dt, A, B, C, D = tensors
        return x[:, span], dt[:, span], A, B[:, span], C[:, span], D

    whole, last = ssd(*turn(inputs, start, layout))
    first, state = ssd(*turn(part(inputs, slice(cut)), start, layout))
    rest = part(inputs, slice(cut, None))
    second, end = ssd(*turn(rest, start + cut, layout), initial_state=state)
    assert_same(torch.cat([first, second], dim=1), whole)
    assert_same(end, last)

    restarted, _ = ssd(*turn(rest, start, layout), initial_state=state)
    assert (restarted - second).abs().max() > 1e-9


@given(turned_ssd())
def test_turned_ssd_is_a_complex_diagonal_state_space(case):
    """h_t = e^{a_t + iθ} h_{t−1} + dt_t x_t b̄_t,  y_t = Re(c_t·h_t) + D x_t: no rotation at all."""
    inputs, _, layout = case
    x, dt, A, B, C, D = inputs
    n, h = B.shape[-1], x.shape[2]
    theta = 10_000.0 ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)

    def as_complex(z: Tensor) -> Tensor:
        z = z.unflatten(-1, (2, -1)).mT if layout == "half" else z.unflatten(-1, (-1, 2))
        heads = repeat_groups(z.flatten(-2), h).unflatten(-1, (-1, 2))
        return torch.view_as_complex(heads.contiguous())

    b, c = as_complex(B).conj(), as_complex(C)
    state, outputs = torch.zeros(*x.shape[::2], x.shape[3], n // 2, dtype=b.dtype), []
    for t in range(x.shape[1]):
        decay = torch.exp((dt[:, t] * A)[..., None] + 1j * theta)[:, :, None]
        write = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = decay * state + write
        outputs.append((state * c[:, t, :, None]).sum(-1).real)
    expected = torch.stack(outputs, dim=1) + D[:, None] * x
    assert_same(ssd(*turn(inputs, 0, layout), chunk_len=5)[0], expected)
