"""Errata R1 to R7: the rotation, as printed and as meant."""

import math

import pytest
import torch
from torch import Tensor

from lab.layers.attention import Attention
from lab.layers.printed import DynamicBaseAttention, HeadRotatedAttention
from lab.layers.printed.rotation import dynamic_base, rotate_skewed
from lab.ops.rope import rotary_table, rotate
from tests.normal import draw_normal
from tests.paper.conftest import Run


def block(a: float, b: float) -> Tensor:
    """A block with angle a in its first column and b in its second."""
    rows = [[math.cos(a), -math.sin(b)], [math.sin(a), math.cos(b)]]
    return torch.tensor(rows, dtype=torch.float64)


def build_printed_matrix(j: int, n: int, base: float = 10000.0) -> Tensor:
    theta = [base ** (-2 * m / n) for m in range(n // 2 + 1)]
    blocks = [block(j * theta[m], j * theta[m]) for m in range(n // 2 - 1)]
    return torch.block_diag(*blocks, block(j * theta[n // 2], j * theta[n // 2 - 1]))


def test_r1_the_printed_matrix_is_not_orthogonal(erratum: Run):
    n, positions = 8, torch.arange(2048)
    x = draw_normal(1, 5, 1, n)
    turned = rotate_skewed(x, torch.arange(100, 105))[0, :, 0]
    for token, j in enumerate(range(100, 105)):
        torch.testing.assert_close(turned[token], build_printed_matrix(j, n) @ x[0, token, 0])
    R = build_printed_matrix(700, n)
    skew = (R.T @ R - torch.eye(n)).abs()
    # Columns of one block stay of length one; their product is the sine of the angles' difference.
    assert skew.max() == skew[-1, -2] == pytest.approx(math.sin(700 * (1e-3 - 1e-4)))
    worst = (positions * (1e-3 - 1e-4)).sin().abs().max().item()
    found = erratum("R1")
    assert f"off the identity by {worst:.1e}" in found.printed_evidence
    right = torch.block_diag(*(block(700 * 10 ** (-m), 700 * 10 ** (-m)) for m in range(4)))
    assert (right.T @ right - torch.eye(n)).abs().max() < 1e-15


@pytest.mark.parametrize(("j", "i", "theta"), [(7, 3, 0.3), (2, 9, 1.0), (5, 5, 0.1)])
def test_r2_the_last_matrix_of_the_proof_turns_the_wrong_way(j: int, i: int, theta: float):
    c, b, delta = draw_normal(2), draw_normal(2, seed=1), (j - i) * theta
    right = (block(j * theta, j * theta) @ c) @ (block(i * theta, i * theta) @ b)
    printed, meant = c @ block(delta, delta) @ b, c @ block(-delta, -delta) @ b
    torch.testing.assert_close(meant, right)
    # What the flipped sign is worth: nothing only for a token with itself.
    off = 2 * math.sin(delta) * (c[1] * b[0] - c[0] * b[1])
    torch.testing.assert_close(printed - right, off)


def test_r3_layouts_are_a_permutation_apart():
    n, x, positions = 6, draw_normal(1, 9, 1, 6), torch.arange(9)
    neighbours, halves = (rotate(x, positions, layout=y) for y in ("interleaved", "half"))
    assert (neighbours - halves).abs().max() > 1
    order = [0, 2, 4, 1, 3, 5]
    assert torch.equal(rotate(x[..., order], positions), neighbours[..., order])
    for m in range(n // 2):
        angle = positions[3] * 10000 ** (-2 * m / n)
        for y, pair in ((neighbours, [2 * m, 2 * m + 1]), (halves, [m, m + n // 2])):
            right = block(float(angle), float(angle)) @ x[0, 3, 0, pair]
            torch.testing.assert_close(y[0, 3, 0, pair], right)


def test_r4_the_listing_does_not_start(erratum: Run):
    evidence = erratum("R4").printed_evidence
    for kind in ("AttributeError", "RuntimeError", "ZeroDivisionError"):
        assert kind in evidence
    with pytest.raises(RuntimeError, match="type"):
        _ = torch.ones(1, 3, 1) @ torch.arange(4)[None, None]
    # Only past max_position does the exponent dim/(dim − 2) come into it.
    assert dynamic_base(10000.0, 5, 2, 5) == 10000.0
    with pytest.raises(ZeroDivisionError):
        dynamic_base(10000.0, 6, 2, 5)
    x, j = draw_normal(1, 1, 1, 2), 12345
    torch.testing.assert_close(
        rotate(x, torch.tensor([j]))[0, 0, 0], block(j, j) @ x[0, 0, 0], rtol=0, atol=1e-11
    )


def test_r5_with_as_many_heads_as_tokens_there_are_no_positions(erratum: Run):
    t, d = 4, 16
    printed = HeadRotatedAttention(d, t).double()
    blind, seeing = (Attention(d, t, position=p).double() for p in ("none", "rope"))
    for layer in (blind, seeing):
        layer.load_state_dict(printed.state_dict())
    x = draw_normal(2, t, d)
    torch.testing.assert_close(printed(x), blind(x), rtol=0, atol=1e-14)
    assert (printed(x) - seeing(x)).abs().max() > 1e-3
    found = erratum("R5")
    # Broadcasting itself: an axis for t where the one head stood.
    q, cos = torch.ones(2, 1, 6, 8), torch.ones(2, 6, 8)
    assert (q * cos.unsqueeze(2)).shape == (2, 6, 6, 8)
    assert "[2, 6, 6, 8]" in found.printed_evidence
    assert "cannot be multiplied" in found.printed_evidence
    assert "size of tensor a (4)" in found.printed_evidence


def test_r6_the_base_follows_the_length():
    assert dynamic_base(1e4, 64, 16, 32) == pytest.approx(1e4 * 2 ** (16 / 14))
    assert dynamic_base(1e4, 64, 16, 32, scaling=3.0) == pytest.approx(1e4 * 4 ** (16 / 14))
    assert dynamic_base(1e4, 32, 16, 32) == 1e4
    torch.manual_seed(0)
    printed = DynamicBaseAttention(8, max_position=8).double()
    fixed = Attention(8).double()
    fixed.load_state_dict(printed.state_dict())
    x = draw_normal(2, 20, 8)
    torch.testing.assert_close(printed(x[:, :8]), fixed(x[:, :8]))
    assert (printed(x)[:, :16] - printed(x[:, :16])).abs().max() > 1e-4
    torch.testing.assert_close(fixed(x)[:, :16], fixed(x[:, :16]))
    # Within a call: by the base of one length, a score is a function of the distance alone.
    base = dynamic_base(1e4, 20, 8, 8)
    q, k = (draw_normal(8, seed=s).expand(1, 12, 1, 8) for s in (1, 2))
    positions = torch.arange(12)
    scores = (rotate(q, positions + 3, base) * rotate(k, positions, base)).sum(-1)
    assert scores.std() < 1e-13


def test_r7_bf16_angles(erratum: Run):
    t, n, low = 2048, 64, torch.bfloat16
    exact = torch.arange(t).double()[:, None] * 1e4 ** (-torch.arange(0, n, 2).double() / n)
    cos = rotary_table(torch.arange(t), n)[0]
    # As printed: the table rounded, by half a unit in the last place of a number below one.
    printed = (cos.to(low).double() - exact.cos()).abs().max().item()
    assert 0.9 * 2**-9 < printed < 2**-9 + 1e-4
    # In a module cast to bf16: positions are whole up to 256, then every 2nd, 4th, 8th.
    assert torch.arange(257).to(low).tolist() == list(range(257))
    assert (torch.arange(t).to(low).double() - torch.arange(t)).abs().max() == 4
    cast = rotary_table(torch.arange(t), n, dtype=low)[0]
    assert (cast.double() - exact.cos()).abs().max() > 1.99
    assert (cos.double() - exact.cos()).abs().max() < 1e-4
    found = erratum("R7")
    assert f"cos off by {printed:.1e}" in found.printed_evidence
    assert "cos by 2.00" in found.printed_evidence
