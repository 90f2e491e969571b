import pytest
import torch
from torch.testing import assert_close

from lab.ops import experts as experts_ops
from lab.ops.experts import (
    expert_scores,
    expert_sum,
    naive_expert_scores,
    naive_expert_sum,
    resolve_experts_backend,
)
from tests.largest import Largest

SHAPES = [(1, 1, 1, 1, 1, 1), (2, 3, 5, 2, 4, 7), (2, 5, 8, 3, 2, 4)]
"""b, t, d, h, k, e; the last with more choices than experts."""

BACKENDS = ("gather", "dense")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(params=["one block", "blocks of two"])
def blocks(request, monkeypatch):
    """Let the dense backend cut the 6 or 10 tokens of the larger shapes into blocks, or not."""
    if request.param == "blocks of two":
        # Two rows of 7 float64, or three of 4.
        monkeypatch.setattr(experts_ops, "BLOCK_BYTES", 2 * 7 * 8)


def draw(shape, dtype=torch.float64):
    """Return x [b t d], weights [b t h k], table [e d], indices [b t h k]."""
    b, t, d, h, k, e = shape
    generator = torch.Generator().manual_seed(0)
    x, weights, table = (
        torch.randn(*size, generator=generator, dtype=dtype, requires_grad=True)
        for size in ((b, t, d), (b, t, h, k), (e, d))
    )
    return x, weights, table, torch.randint(e, (b, t, h, k), generator=generator)


@each_shape
@each_backend
@pytest.mark.usefixtures("blocks")
def test_values_equal_the_oracles(shape, backend):
    x, weights, table, indices = draw(shape)
    assert_close(expert_scores(x, table, indices, backend), naive_expert_scores(x, table, indices))
    assert_close(
        expert_sum(weights, table, indices, backend), naive_expert_sum(weights, table, indices)
    )


@each_shape
@each_backend
@pytest.mark.usefixtures("blocks")
def test_gradients_equal_the_oracles(shape, backend):
    x, weights, table, indices = draw(shape)
    for form, oracle, inputs in (
        (expert_scores, naive_expert_scores, (x, table)),
        (expert_sum, naive_expert_sum, (weights, table)),
    ):
        grads = torch.autograd.grad(form(*inputs, indices, backend).square().sum(), inputs)
        expected = torch.autograd.grad(oracle(*inputs, indices).square().sum(), inputs)
        assert_close(grads, expected)


@each_backend
@pytest.mark.parametrize("form", [expert_scores, expert_sum])
def test_a_frozen_table_or_input_is_no_obstacle(form, backend):
    x, weights, table, indices = draw(SHAPES[1])
    left = x if form is expert_scores else weights
    both = torch.autograd.grad(form(left, table, indices, backend).sum(), (left, table))
    (alone,) = torch.autograd.grad(form(left, table.detach(), indices, backend).sum(), left)
    assert_close(alone, both[0])
    (alone,) = torch.autograd.grad(form(left.detach(), table, indices, backend).sum(), table)
    assert_close(alone, both[1])


@each_backend
def test_gradients_of_gradients_equal_finite_differences(backend):
    x, weights, table, indices = draw(SHAPES[1])
    for form, inputs in ((expert_scores, (x, table)), (expert_sum, (weights, table))):
        torch.autograd.gradgradcheck(lambda *inputs, f=form: f(*inputs, indices, backend), inputs)


@each_backend
@pytest.mark.parametrize("autocast", [False, True])
def test_results_have_the_tables_dtype(backend, autocast):
    x, weights, table, indices = draw(SHAPES[1], torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = expert_scores(x.bfloat16(), table, indices, backend)
        y = expert_sum(weights.bfloat16(), table, indices, backend)
    assert scores.dtype == y.dtype == torch.float32
    # fp32 products of what bf16 left of x and of the weights: autocast rounds nothing more.
    expected = naive_expert_scores(x.bfloat16().float(), table, indices)
    assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    assert_close(
        y, naive_expert_sum(weights.bfloat16().float(), table, indices), rtol=1e-6, atol=1e-6
    )


@pytest.mark.gpu
@each_backend
def test_on_a_gpu_tables_in_bf16_have_gradients(backend):
    leaves = [z.detach().cuda().requires_grad_() for z in draw(SHAPES[2], torch.float32)[:3]]
    x, weights, table = (z.bfloat16() for z in leaves)
    indices = draw(SHAPES[2])[3].cuda()
    y = expert_sum(weights * expert_scores(x, table, indices, backend), table, indices, backend)
    given = x.float(), weights.float(), table.float()
    scores = naive_expert_scores(given[0], given[2], indices)
    expected = naive_expert_sum(given[1] * scores, given[2], indices)
    against = torch.randn_like(expected)
    grads = [torch.autograd.grad((z * against).sum(), leaves) for z in (y.float(), expected)]
    for ours, theirs in zip((y, *grads[0]), (expected, *grads[1]), strict=True):
        assert_close(ours.float(), theirs, rtol=0, atol=0.05 * theirs.abs().max().item())


@each_backend
def test_float32_is_within_its_bound(backend):
    shape = (2, 16, 64, 4, 8, 128)
    x, weights, table, indices = draw(shape, torch.float32)
    u, d, chosen = 2.0**-24, 64, 32
    # Any order of summing n products errs by at most n · u · Σ|product|, to first order. Dense
    # adds an expert's weights first, one rounding more for each time it is chosen again; its other
    # summands are exact zeros.
    for form, left, n in ((expert_scores, x, d), (expert_sum, weights, chosen)):
        error = form(left, table, indices, backend)
        error = error - form(left.double(), table.double(), indices, backend)
        size = form(left.abs().double(), table.abs().double(), indices, backend)
        assert (error.abs() <= 1.01 * n * u * size).all()


@pytest.mark.parametrize(
    ("n_experts", "n_chosen", "width", "expected"),
    [
        (16_384, 128, 256, "gather"),
        (1024, 32, 64, "gather"),
        (1024, 128, 64, "dense"),
        (1024, 128, 256, "gather"),
        (64, 32, 256, "dense"),
        (256, 16, 32, "dense"),
    ],
)
def test_auto_is_the_cheaper_one_as_measured(n_experts, n_chosen, width, expected):
    sizes = {"n_experts": n_experts, "n_chosen": n_chosen, "width": width}
    assert resolve_experts_backend("auto", **sizes) == expected
    assert {resolve_experts_backend(name, **sizes) for name in BACKENDS} == set(BACKENDS)


def test_an_unknown_backend():
    x, weights, table, indices = draw(SHAPES[1])
    for form, left in ((expert_scores, x), (expert_sum, weights)):
        with pytest.raises(
            ValueError, match="backend='sparse': must be one of auto, gather, dense"
        ):
            form(left, table, indices, "sparse")


def test_chosen_rows_are_never_materialised():
    b, t, d, h, k, e = 1, 64, 128, 4, 16, 256
    x, weights, table, indices = draw((b, t, d, h, k, e), torch.float32)
    with Largest() as largest:
        scores = expert_scores(x, table, indices, "gather")
        expert_sum(scores * weights, table, indices, "gather").square().sum().backward()
    assert largest.numel == max(e * d, b * t * d, b * t * h * k)
    with Largest() as largest:
        naive_expert_scores(x, table, indices)
    assert largest.numel == b * t * h * k * d
