"""The scan of a diagonal recurrence: halving and single tokens agree, with all gradients."""

import pytest
import torch
from torch.func import grad, vmap

from lab.ops.scan import scan, scan_loop
from tests.normal import draw_normal


def problem(t: int, state: tuple[int, ...] = (3, 2)) -> list[torch.Tensor]:
    """Decays of both signs, a fifth of them 0; what is written; and an initial state."""
    decay = draw_normal(2, t, *state).tanh()
    decay = decay.where(draw_normal(2, t, *state, seed=1).abs() > 0.25, 0)
    return [decay, draw_normal(2, t, *state, seed=2), draw_normal(2, *state, seed=3)]


@pytest.mark.parametrize("t", [*range(1, 18), 64, 100])
def test_halving_is_the_loop_with_its_gradients(t: int):
    inputs = [z.requires_grad_() for z in problem(t)]
    weight = draw_normal(2, t, 3, 2, seed=4)
    found = []
    for form in (scan, scan_loop):
        states = form(*inputs)
        found.append([states, *torch.autograd.grad((states * weight).sum(), inputs)])
    torch.testing.assert_close(*found)


def test_it_goes_on_from_a_state():
    decay, written, before = problem(11)
    first = scan(decay[:, :4], written[:, :4], before)
    rest = scan(decay[:, 4:], written[:, 4:], first[:, -1])
    torch.testing.assert_close(torch.cat([first, rest], 1), scan(decay, written, before))


def test_second_derivatives():
    inputs = [z.requires_grad_() for z in problem(5, (1,))]
    assert torch.autograd.gradgradcheck(scan, inputs)


def test_transforms_see_the_same():
    decay, written, _ = problem(6)
    expected = torch.autograd.functional.jacobian(lambda a: scan(a, written).sum(), decay)
    torch.testing.assert_close(grad(lambda a: scan(a, written).sum())(decay), expected)
    rows = vmap(lambda a, w: scan(a[None], w[None])[0])(decay, written)
    torch.testing.assert_close(rows, scan(decay, written))


def test_fp32_over_4096_tokens_is_exact_to_a_hundred_thousandth():
    decay = 1 - draw_normal(1, 4096, 8).abs() * torch.tensor(10.0).pow(-torch.arange(8.0))
    single = [decay.float(), draw_normal(1, 4096, 8, seed=1).float()]
    expected = scan_loop(*(z.double() for z in single))
    error = (scan(*single) - expected).abs().amax((0, 1)) / expected.abs().amax((0, 1))
    assert error.max() < 1e-5


def test_shapes_are_checked(unchecked):
    ones = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"decay is \[2, 3\], must be \[2, 3, 4\]"):
        scan(ones[..., 0], ones)
    with pytest.raises(ValueError, match=r"initial_state is \[2, 3, 4\], must be \[2, 4\]"):
        scan(ones, ones, ones)
    with pytest.raises(ValueError, match="with t ≥ 1"):
        scan_loop(ones[:, :0], ones[:, :0])
