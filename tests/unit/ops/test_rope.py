"""Rotary positions by example: gradients, low precision, and what is refused."""

import pytest
import torch

from lab.ops.rope import apply_rotary, rotary_table, rotate, rotate_by_matrix


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_turns_a_pair_by_its_position_in_radians():
    turned = rotate(torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.tensor([2]))
    expected = torch.tensor([2.0, 2.0 - torch.pi / 2]).cos().view(1, 1, 1, 2)
    torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("positions", [torch.tensor([3, 1]), torch.tensor([[3, 1], [0, 7]])])
def test_gradients(layout, positions):
    x = normal(2, 2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, positions, 100.0, layout), x)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, positions, 100.0, layout), x)


def test_one_head_turns_by_position_and_not_by_row_of_a_square():
    """Erratum R5: with one head, or as many heads as tokens, a guessed axis broadcasts."""
    for x in (normal(2, 3, 1, 4), normal(2, 3, 3, 4)):
        turned = rotate(x, torch.arange(3))
        assert turned.shape == x.shape
        torch.testing.assert_close(turned, rotate_by_matrix(x, torch.arange(3)))


def test_bf16_is_as_exact_as_its_result_can_be():
    """Erratum R7: angles in bf16 would turn vectors half round; the result alone is rounded."""
    x, positions = normal(1, 2048, 1, 64).bfloat16(), torch.arange(2048)
    exact = rotate_by_matrix(x.double(), positions)
    assert rotate(x, positions).dtype == torch.bfloat16
    error = (rotate(x, positions).double() - exact).abs()
    # Rounding to bf16 is off by 2^-8 of an entry at most; fp32 angles add 2·2^-24·2048 = 2^-12.
    norms = x.double().unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 1, 2)
    assert (error <= norms * (2**-8 + 2**-12 + 1e-6)).all()

    cos, sin = (angle.bfloat16() for angle in rotary_table(positions, 64))
    angles = positions[:, None].bfloat16() * 10_000.0 ** -(torch.arange(0, 64, 2) / 64).bfloat16()
    off = (angles.double().cos() - rotary_table(positions, 64, dtype=torch.float64)[0]).abs()
    assert off.max() > 1.9
    assert (apply_rotary(x.float(), cos, sin) - rotate(x.float(), positions)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("n", "positions", "options", "message"),
    [
        (5, torch.arange(3), {}, "n=5.*even"),
        (4, torch.arange(4), {}, r"positions are \[4\].*must be \[3\] or \[2, 3\]"),
        (4, torch.arange(1), {}, r"positions are \[1\]"),
        (4, torch.zeros(3, 3, dtype=torch.int64), {}, r"positions are \[3, 3\]"),
        (4, torch.arange(3), {"base": 0.0}, "base=0.0 must be positive"),
        (4, torch.arange(3), {"layout": "halves"}, "layout='halves': must be one of half, inter"),
    ],
)
def test_refuses(unchecked, n, positions, options, message):
    with pytest.raises(ValueError, match=message):
        rotate(normal(2, 3, 1, n), positions, **options)
