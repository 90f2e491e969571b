import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.ops.experts import (
    expert_scores,
    expert_sum,
    naive_expert_scores,
    naive_expert_sum,
)

SHAPES = [(1, 1, 1, 1, 1, 1), (2, 3, 5, 2, 4, 7), (2, 5, 8, 3, 2, 4)]
"""b, t, d, h, k, e; the last with more choices than experts."""


def draw(shape, dtype=torch.float64):
    """Return x [b t d], weights [b t h k], table [e d], indices [b t h k]."""
    b, t, d, h, k, e = shape
    generator = torch.Generator().manual_seed(0)
    x, weights, table = (
        torch.randn(*size, generator=generator, dtype=dtype, requires_grad=True)
        for size in ((b, t, d), (b, t, h, k), (e, d))
    )
    return x, weights, table, torch.randint(e, (b, t, h, k), generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_equal_the_oracles(shape):
    x, weights, table, indices = draw(shape)
    assert_close(expert_scores(x, table, indices), naive_expert_scores(x, table, indices))
    assert_close(expert_sum(weights, table, indices), naive_expert_sum(weights, table, indices))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_the_oracles(shape):
    x, weights, table, indices = draw(shape)
    for form, oracle, inputs in (
        (expert_scores, naive_expert_scores, (x, table)),
        (expert_sum, naive_expert_sum, (weights, table)),
    ):
        grads, expected = (
            torch.autograd.grad(f(*inputs, indices).square().sum(), inputs) for f in (form, oracle)
        )
        assert_close(grads, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_finite_differences(shape):
    x, weights, table, indices = draw(shape)
    for form, inputs in ((expert_scores, (x, table)), (expert_sum, (weights, table))):
        torch.autograd.gradcheck(lambda *inputs, f=form: f(*inputs, indices), inputs)


def test_the_two_are_adjoint():
    x, weights, table, indices = draw(SHAPES[1])
    assert_close(
        (expert_sum(weights, table, indices) * x).sum(),
        (weights * expert_scores(x, table, indices)).sum(),
    )


def test_only_chosen_rows_get_gradient():
    x, weights, table, _ = draw(SHAPES[1])
    indices = torch.full_like(weights, 3, dtype=torch.int64)
    for y in (expert_scores(x, table, indices), expert_sum(weights, table, indices)):
        (grad,) = torch.autograd.grad(y.sum(), table)
        assert grad.abs().sum(1).nonzero().flatten().tolist() == [3]


def test_a_frozen_table_or_input_is_no_obstacle():
    x, _, table, indices = draw(SHAPES[1])
    (alone,) = torch.autograd.grad(expert_scores(x, table.detach(), indices).sum(), x)
    assert_close(alone, torch.autograd.grad(expert_scores(x, table, indices).sum(), x)[0])
    (alone,) = torch.autograd.grad(expert_scores(x.detach(), table, indices).sum(), table)
    assert_close(alone, torch.autograd.grad(expert_scores(x, table, indices).sum(), table)[0])


def test_a_second_derivative_is_refused_not_wrong():
    x, _, table, indices = draw(SHAPES[1])
    loss = expert_scores(x, table, indices).square().sum()
    (grad,) = torch.autograd.grad(loss, table, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


def test_results_have_the_tables_dtype():
    x, weights, table, indices = draw(SHAPES[1], torch.float32)
    assert expert_scores(x.bfloat16(), table, indices).dtype == torch.float32
    assert expert_sum(weights.bfloat16(), table, indices).dtype == torch.float32


def test_float32_is_within_its_bound():
    shape = (2, 16, 64, 4, 8, 128)
    x, weights, table, indices = draw(shape, torch.float32)
    u, d, chosen = 2.0**-24, 64, 32
    # Any order of summing n products errs by at most n · u · Σ|product|, to first order.
    for form, left, n in ((expert_scores, x, d), (expert_sum, weights, chosen)):
        error = form(left, table, indices) - form(left.double(), table.double(), indices)
        size = form(left.abs().double(), table.abs().double(), indices)
        assert (error.abs() <= 1.01 * n * u * size).all()


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *(t.numel() for t in tensors)])
        return out


def test_chosen_rows_are_never_materialised():
    b, t, d, h, k, e = 1, 64, 128, 4, 16, 256
    x, weights, table, indices = draw((b, t, d, h, k, e), torch.float32)
    with Largest() as largest:
        scores = expert_scores(x, table, indices)
        expert_sum(scores * weights, table, indices).square().sum().backward()
    assert largest.numel == max(e * d, b * t * d, b * t * h * k)
    with Largest() as largest:
        naive_expert_scores(x, table, indices)
    assert largest.numel == b * t * h * k * d
