"""Linear attention over levels: by levels, by its matrix and token by token."""

from typing import Any

import pytest
import torch

from lab.ops.log_linear import collect_levels, log_linear, log_linear_matrix, log_linear_step
from tests.normal import draw_normal


def problem(t: int, n_levels: int, decay: float = 0.1) -> list[torch.Tensor]:
    """Arguments of `log_linear`: 2 rows, 2 heads, keys of 3 channels, values of 4."""
    q, k = draw_normal(2, t, 2, 3), draw_normal(2, t, 2, 3, seed=1)
    v, g = draw_normal(2, t, 2, 4, seed=2), -decay * draw_normal(2, t, 2, seed=3).abs()
    return [q, k, v, g, draw_normal(2, t, 2, n_levels, seed=4)]


def apply_matrix(q, k, v, log_decay, scales):
    return torch.einsum("bhts,bshp->bthp", log_linear_matrix(q, k, log_decay, scales), v)


def read_one_by_one(q, k, v, log_decay, scales):
    levels = q.new_zeros(2, scales.shape[-1] - 1, 2, 3, 4)
    outputs = []
    for i in range(q.shape[1]):
        now: Any = [z[:, i] for z in (k, v, log_decay, scales)]
        read, levels = log_linear_step(*now, levels=levels, at=torch.full((2,), i))
        outputs.append(torch.einsum("bhnp,bhn->bhp", read, q[:, i]))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("n_levels", [2, 3, 8])
@pytest.mark.parametrize("t", [1, 2, 3, 8, 21, 64])
def test_all_forms_agree_with_their_gradients(t: int, n_levels: int):
    inputs = [z.requires_grad_() for z in problem(t, n_levels)]
    found = []
    for form in (log_linear, apply_matrix, read_one_by_one):
        y = form(*inputs)
        weight = draw_normal(*y.shape, seed=5)
        gradients = torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True)
        found.append(
            [
                y,
                *(
                    torch.zeros_like(z) if g is None else g
                    for z, g in zip(inputs, gradients, strict=True)
                ),
            ]
        )
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[1])


@pytest.mark.parametrize("n_levels", [2, 4, 8])
@pytest.mark.parametrize("t", [1, 6, 16, 23])
def test_states_of_levels_are_those_of_single_tokens(t: int, n_levels: int):
    _, k, v, g, scales = problem(t, n_levels)
    lengths, levels = torch.tensor([t, (t + 1) // 2]), torch.zeros(2, n_levels - 1, 2, 3, 4)
    behind = torch.arange(t) >= lengths[:, None]
    k, g = k.masked_fill(behind[..., None, None], 0), g.masked_fill(behind[..., None], 0)
    levels = levels.double()
    for i in range(t):
        now: Any = [z[:, i] for z in (k, v, g, scales)]
        _, after = log_linear_step(*now, levels=levels, at=torch.full((2,), i))
        levels = levels.where((i >= lengths)[:, None, None, None, None], after)
    torch.testing.assert_close(collect_levels(k, v, g, n_levels, lengths), levels)


@pytest.mark.parametrize("decay", [1e-3, 1.0, 1e4])
def test_fp32_over_1024_tokens_is_exact_to_a_hundred_thousandth(decay: float):
    single = [z.float() for z in problem(1024, 11, decay)]
    exact = apply_matrix(*(z.double() for z in single))
    assert (log_linear(*single) - exact).abs().max() <= 1e-5 * exact.abs().max()
