import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lab.ops.product_keys import naive_product_topk, product_topk


@st.composite
def searches(draw, integer_scores):
    """Row scores, column scores and a k they allow; integers tie often."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    leading = draw(st.lists(st.integers(1, 3), max_size=2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = 2.0 ** draw(st.integers(-20, 20))
    scores = [
        scale * torch.randn(*leading, n, generator=generator, dtype=torch.float64)
        if not integer_scores
        else torch.randint(-2, 3, (*leading, n), generator=generator).float()
        for n in (rows, columns)
    ]
    return *scores, draw(st.integers(1, rows * columns))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(searches(integer_scores=False))
def test_equals_the_oracle(search):
    row_scores, column_scores, k = search
    scores, indices = product_topk(row_scores, column_scores, k)
    expected_scores, expected_indices = naive_product_topk(row_scores, column_scores, k)
    # The same two numbers are added in both forms, so the sums agree to the last bit.
    assert_close(scores, expected_scores, rtol=0, atol=0)
    assert_close(indices.sort().values, expected_indices.sort().values)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(searches(integer_scores=True))
def test_ties_change_no_score_and_repeat_no_expert(search):
    row_scores, column_scores, k = search
    scores, indices = product_topk(row_scores, column_scores, k)
    assert_close(scores, naive_product_topk(row_scores, column_scores, k)[0], rtol=0, atol=0)
    all_scores = (row_scores[..., :, None] + column_scores[..., None, :]).flatten(-2)
    assert_close(all_scores.gather(-1, indices), scores, rtol=0, atol=0)
    assert (indices.sort().values.diff() > 0).all()


@settings(deadline=None, derandomize=True, max_examples=50)
@given(searches(integer_scores=False))
def test_gradients_equal_the_oracles(search):
    row_scores, column_scores, k = search
    inputs = row_scores.requires_grad_(), column_scores.requires_grad_()
    grads, expected = (
        torch.autograd.grad(form(*inputs, k)[0].square().sum(), inputs)
        for form in (product_topk, naive_product_topk)
    )
    # A score is in up to 9 of the chosen sums, which the two forms add in different orders.
    for grad, other in zip(grads, expected, strict=True):
        assert_close(grad, other, rtol=0, atol=float(9 * 2**-52 * grad.abs().max()) + 2**-52)
