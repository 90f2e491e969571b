"""The blocked cross-entropy against the obvious one: values, gradients, blocks, memory."""

from functools import partial

import pytest
import torch

from lab.ops import cross_entropy
from lab.ops.cross_entropy import (
    linear_answers,
    linear_argmax,
    linear_cross_entropy,
    naive_linear_cross_entropy,
)


def problem(q, v, d, dtype=torch.float64, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(q, d, generator=g, dtype=torch.float64)).to(dtype)
    weight = torch.randn(v, d, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(v, (q,), generator=g)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def gradients(form, hidden, weight, targets):
    loss, correct = form(hidden, weight, targets)
    return loss, correct, *torch.autograd.grad(3.0 * loss, (hidden, weight))


@pytest.mark.parametrize("block_rows", [1, 3, 7, 100])
@pytest.mark.parametrize(("q", "v", "d"), [(1, 2, 1), (7, 11, 5), (23, 64, 8)])
def test_values_and_gradients_equal_the_oracle(monkeypatch, block_rows, q, v, d):
    monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", block_rows * v * 8)
    inputs = problem(q, v, d)
    ours = gradients(linear_cross_entropy, *inputs)
    theirs = gradients(naive_linear_cross_entropy, *inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("block_rows", [1, 3, 100])
@pytest.mark.parametrize("left_out", [0, 1, 22])
def test_positions_without_a_target_count_for_nothing(monkeypatch, block_rows, left_out):
    monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", block_rows * 64 * 8)
    hidden, weight, targets = problem(23, 64, 8)
    targets[torch.randperm(23)[:left_out]] = -100
    padded = partial(linear_cross_entropy, padded=True)
    ours = gradients(padded, hidden, weight, targets)
    theirs = gradients(naive_linear_cross_entropy, hidden, weight, targets)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


def test_bf16_stays_within_the_rounding_of_its_inputs():
    exact = gradients(naive_linear_cross_entropy, *problem(50, 300, 16))
    ours = gradients(linear_cross_entropy, *problem(50, 300, 16, torch.bfloat16))
    # A logit is a sum of 16 products of numbers rounded to 8 bits, then rounded itself: with
    # |logit| below 16 it moves by at most 16·3·2⁻⁸ < 0.2, and so does the loss.
    assert abs(ours[0].item() - exact[0].item()) < 0.2
    for mine, other in zip(ours[2:], exact[2:], strict=True):
        assert (
            torch.nn.functional.cosine_similarity(mine.double().flatten(), other.flatten(), dim=0)
            > 1 - 2.0**-8
        )


def test_huge_logits_neither_overflow_nor_lose_the_loss():
    inputs = problem(9, 20, 4, torch.float32, scale=1e4)
    loss, _ = linear_cross_entropy(*inputs)
    oracle, _ = naive_linear_cross_entropy(*inputs)
    torch.testing.assert_close(loss, oracle, rtol=1e-6, atol=0)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets = problem(5, 9, 3)
    loss, _ = linear_cross_entropy(hidden, weight.detach(), targets)
    (grad,) = torch.autograd.grad(loss, hidden)
    oracle, _ = naive_linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(grad, torch.autograd.grad(oracle, hidden)[0])


def test_argmax_takes_the_first_of_a_tie(monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", 64)
    hidden, weight, _ = problem(13, 17, 4)
    assert torch.equal(linear_argmax(hidden, weight), (hidden @ weight.T).argmax(-1))
    assert linear_argmax(torch.zeros(3, 4), torch.randn(5, 4)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_answers_are_the_losses_and_largest_logits_of_each_position(monkeypatch, scale):
    monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", 3 * 17 * 8)
    hidden, weight, targets = problem(13, 17, 4, scale=scale)
    losses, answers = linear_answers(hidden, weight, targets)
    logits = (hidden @ weight.T).detach()
    usual = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, usual, rtol=1e-12, atol=1e-12)
    assert torch.equal(answers, logits.argmax(-1))
    alike = linear_answers(torch.zeros(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 4]))
    assert alike[1].tolist() == [0, 0, 0], "the first of a tie"


@pytest.mark.parametrize(
    ("hidden", "weight", "message"),
    [
        ((0, 4), (5, 4), "hidden has 0 rows: at least one position must be scored"),
        ((2, 4), (5, 3), "hidden is 4 wide, weight 3"),
    ],
)
def test_bad_shapes_are_named(unchecked, hidden, weight, message):
    targets = torch.zeros(hidden[0], dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(torch.zeros(hidden), torch.zeros(weight), targets)
