"""The delta rule by example: precision, memory, derivatives, what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.ops.delta import delta, delta_loop, delta_matrix, delta_states, delta_step
from tests.normal import draw_normal

DECAYS = ("none", "scalar", "channel")
CORRECTIONS = ("none", "key", "another")
NAMES = ("q", "k", "v", "log_decay", "match", "erase", "initial_state")
every_kind = pytest.mark.parametrize(
    ("decay", "correction"), [(d, c) for d in DECAYS for c in CORRECTIONS]
)


def problem(
    decay: str = "scalar",
    correction: str = "key",
    b: int = 2,
    t: int = 13,
    h: int = 2,
    n: int = 5,
    p: int = 3,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Arguments of `delta` by name, with states that live for some tens of tokens."""
    made = {"q": draw_normal(b, t, h, n), "k": draw_normal(b, t, h, n, seed=1)}
    made["v"] = draw_normal(b, t, h, p, seed=2)
    if decay != "none":
        channels = [n] if decay == "channel" else []
        made["log_decay"] = -0.1 * draw_normal(b, t, h, *channels, seed=3).abs()
    if correction != "none":
        made["match"] = F.normalize(draw_normal(b, t, h, n, seed=4), dim=-1)
        taken = 2 * draw_normal(b, t, h, 1, seed=5).sigmoid() * made["match"]
        made["k" if correction == "key" else "erase"] = taken
    made["initial_state"] = draw_normal(b, h, n, p, seed=6)
    return {name: made[name].to(dtype) for name in NAMES if name in made}


def run(*tensors: Tensor, names, **options) -> tuple[Tensor, Tensor]:
    return delta(**dict(zip(names, tensors, strict=True)), **options)


@every_kind
def test_fp32_over_4096_tokens_is_exact_to_a_hundred_thousandth(decay, correction):
    single = problem(decay, correction, b=1, t=4096, h=1, n=16, p=8, dtype=torch.float32)
    expected = delta_loop(**{name: z.double() for name, z in single.items()})
    for actual, exact in zip(delta(**single), expected, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - exact).abs().max() <= 1e-5 * exact.abs().max()


@every_kind
@pytest.mark.parametrize("keys", [2, 512], ids=["two keys in turns", "all keys differ"])
def test_fp32_gradients_over_512_tokens_are_exact_to_a_hundred_thousandth(decay, correction, keys):
    single = problem(decay, correction, b=1, t=512, h=1, n=16, p=8, dtype=torch.float32)
    if correction != "none" and keys == 2:
        single["match"] = single["match"][:, torch.arange(512) % 2]
        rate = 1.9 + 0.1 * draw_normal(1, 512, 1, 1, seed=8, dtype=torch.float32).sigmoid()
        single["k" if correction == "key" else "erase"] = rate * single["match"]

    def differentiate(form, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        leaves = {name: z.clone().requires_grad_() for name, z in given.items()}
        loss = torch.zeros((), dtype=torch.float64)
        for i, z in enumerate(form(**leaves)):
            loss = loss + (z * draw_normal(*z.shape, seed=11 + i)).sum()
        return torch.autograd.grad(loss, list(leaves.values()))

    expected = differentiate(delta_loop, {name: z.double() for name, z in single.items()})
    for name, actual, exact in zip(single, differentiate(delta, single), expected, strict=True):
        assert (actual - exact).abs().max() <= 1e-5 * exact.abs().max(), name


def count_saved_bytes(form, given: dict[str, Tensor], **options) -> int:
    """Return the bytes of all storages that a form's backward would read, its inputs aside."""
    leaves = {name: z.clone().requires_grad_() for name, z in given.items()}
    inputs = {z.untyped_storage().data_ptr() for z in leaves.values()}
    saved = []  # alive until counted: a freed address would be used twice

    def pack(z: Tensor) -> Tensor:
        saved.append(z)
        return z

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda z: z):
        form(**leaves, **options)
    storages = {z.untyped_storage().data_ptr(): z.untyped_storage() for z in saved}
    return sum(storage.nbytes() for at, storage in storages.items() if at not in inputs)


@every_kind
def test_memory_is_linear_in_t_and_below_that_of_the_loop(decay, correction):
    sizes: dict[str, Any] = {"b": 1, "h": 2, "n": 32, "p": 32}
    once = problem(decay, correction, t=512, **sizes)
    first = count_saved_bytes(delta, once)
    twice = count_saved_bytes(delta, problem(decay, correction, t=1024, **sizes))
    assert 1.9 * first <= twice <= 2.05 * first
    assert first < count_saved_bytes(delta_loop, once)


@every_kind
@pytest.mark.parametrize("chunk_len", [2, 8])
def test_second_derivatives_equal_finite_differences(decay, correction, chunk_len):
    given = problem(decay, correction, b=1, t=5, h=1, n=2, p=2)
    leaves = [z.requires_grad_() for z in given.values()]
    torch.autograd.gradgradcheck(lambda *z: run(*z, names=given, chunk_len=chunk_len), leaves)


@every_kind
def test_second_derivatives_of_the_matrix_equal_finite_differences(decay, correction):
    given = problem(decay, correction, b=1, t=5, h=1, n=2, p=2)
    names = [name for name in given if name not in {"v", "initial_state"}]
    torch.autograd.gradgradcheck(
        lambda *z: delta_matrix(**dict(zip(names, z, strict=True))),
        [given[name].requires_grad_() for name in names],
    )


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jvp_is_that_of_the_loop(decay, correction, dtype):
    given = problem(decay, correction, dtype=dtype)
    tangents = {name: draw_normal(*z.shape, seed=9).to(dtype) for name, z in given.items()}
    (expected, actual) = (
        torch.func.jvp(
            lambda *z, form=form: form(**dict(zip(given, z, strict=True))),
            tuple(given.values()),
            tuple(tangents.values()),
        )
        for form in (delta_loop, lambda **z: delta(**z, chunk_len=4))
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, theirs in zip(actual, expected, strict=True):
        for z, exact in zip(ours, theirs, strict=True):
            assert (z - exact).abs().max() <= tolerance * exact.abs().max()


@every_kind
def test_vmap_of_gradients_is_one_after_another(decay, correction):
    rows = [
        {name: torch.roll(z, i, 1) for name, z in problem(decay, correction).items()}
        for i in range(3)
    ]

    def weigh(given: dict[str, Tensor]) -> Tensor:
        y, state = delta(**given, chunk_len=4)
        return y.square().sum() + state.square().sum()

    at_once = torch.func.vmap(torch.func.grad(weigh))(
        {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    )
    for i, row in enumerate(rows):
        leaves = [z.requires_grad_() for z in row.values()]
        expected = torch.autograd.grad(weigh(row), leaves)
        for name, gradient in zip(row, expected, strict=True):
            torch.testing.assert_close(at_once[name][i], gradient)


@every_kind
def test_bf16_is_computed_in_fp32(decay, correction):
    given = problem(decay, correction, t=300, dtype=torch.bfloat16)
    y, state = delta(**given)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    expected, last = delta_loop(**{name: z.double() for name, z in given.items()})
    # Rounding to bf16 is off by 2^-8 of an entry; fp32 adds next to nothing.
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)
    assert (state - last).abs().max() <= 1e-5 * last.abs().max()
    assert delta_loop(**given)[0].dtype == torch.bfloat16
    token = {name: z[:, 0] for name, z in given.items() if name != "initial_state"}
    absent = dict.fromkeys(("log_decay", "match", "erase"))
    z, state = delta_step(**{**absent, **token}, state=given["initial_state"].float())
    assert (z.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(z, y[:, 0])


@every_kind
def test_autocast_changes_nothing(decay, correction):
    given = problem(decay, correction, t=40, dtype=torch.float32)
    leaves = {name: z.requires_grad_() for name, z in given.items()}

    def results() -> list[Tensor]:
        y, state = delta(**leaves)
        some = {name: z for name, z in leaves.items() if name not in {"v", "initial_state"}}
        return [y, state, delta_matrix(**some), *delta_loop(**leaves)]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        actual = results()
    for mine, other in zip(actual, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -1e4, -1e30, -torch.inf])
@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_any_log_decay(decay, log_decay):
    """All tokens alike, in fp32: an exponential that overflows would give NaN."""
    given = problem(decay, t=70, dtype=torch.float32)
    given["log_decay"] = torch.full_like(given["log_decay"], log_decay)
    leaves = {name: z.requires_grad_() for name, z in given.items()}
    expected = delta_loop(**{name: z.double() for name, z in given.items()})
    actual = delta(**leaves)
    for z, exact in zip(actual, expected, strict=True):
        assert (z - exact).abs().max() <= 1e-5 * exact.abs().max()
    gradients = [
        torch.autograd.grad(y.square().sum() + state.square().sum(), list(leaves.values()))
        for y, state in (actual, expected)
    ]
    for z, exact in zip(*gradients, strict=True):
        assert (z - exact).abs().max() <= 1e-5 * exact.abs().max() + 1e-30


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", draw_normal(2, 0, 2, 5), "there are t=0 tokens, must be at least 1"),
        ("k", draw_normal(2, 13, 2, 4), r"k is \[2, 13, 2, 4\], must be \[2, 13, 2, 5\]"),
        ("v", draw_normal(2, 13, 1, 3), r"v is \[2, 13, 1, 3\], must be \[2, 13, 2, 3\]"),
        ("match", draw_normal(1, 13, 2, 5), r"match is \[1, 13, 2, 5\], must be \[2, 13, 2, 5\]"),
        ("erase", draw_normal(2, 12, 2, 5), r"erase is \[2, 12, 2, 5\], must be \[2, 13, 2, 5\]"),
        (
            "log_decay",
            draw_normal(2, 13, 2, 1),
            r"log_decay is \[2, 13, 2, 1\], must be \[2, 13, 2\] or \[2, 13, 2, 5\]",
        ),
        (
            "initial_state",
            draw_normal(1, 2, 5, 3),
            r"initial_state is \[1, 2, 5, 3\], must be \[2, 2, 5, 3\]",
        ),
        ("match", None, "erase needs a match"),
        ("chunk_len", 0, "chunk_len=0 must be at least 1"),
    ],
)
def test_refuses(unchecked, name, value, message):
    given = problem(correction="another") | {name: value}
    with pytest.raises(ValueError, match=message):
        delta(**given)
    if name != "chunk_len":
        with pytest.raises(ValueError, match=message):
            delta_loop(**given)


def test_states_and_matrix_refuse_too(unchecked):
    given = problem(correction="none")
    q, k, v, log_decay = (given[name] for name in NAMES[:4])
    with pytest.raises(ValueError, match=r"v is \[2, 12, 2, 3\], must be \[2, 13, 2, 3\]"):
        delta_states(k, v[:, 1:], log_decay)
    with pytest.raises(ValueError, match=r"k is \[2, 12, 2, 5\], must be \[2, 13, 2, 5\]"):
        delta_matrix(q, k[:, 1:], log_decay)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("state", draw_normal(1, 2, 5, 3), r"state is \[1, 2, 5, 3\], must be \[2, 2, 5, 3\]"),
        ("k", draw_normal(2, 1, 5), r"k is \[2, 1, 5\], must be \[2, 2, 5\]"),
        ("log_decay", draw_normal(2, 1), r"log_decay is \[2, 1\], must be \[2, 2\] or"),
        ("match", None, "erase needs a match"),
    ],
)
def test_a_step_refuses(unchecked, name, value, message):
    given = problem(correction="another")
    state = given.pop("initial_state")
    token: dict[str, Any] = {name: z[:, 0] for name, z in given.items()} | {"state": state}
    with pytest.raises(ValueError, match=message):
        delta_step(**(token | {name: value}))
