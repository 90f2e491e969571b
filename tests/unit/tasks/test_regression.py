"""Regression: its numbers, its oracle against torch's least squares, and its shortcuts."""

import math

import pytest
import torch

from tasks.base import count_right
from tasks.regression import Regression


def test_numbers_are_normal_and_y_is_their_product():
    task = Regression(seq_len=20, n_dims=6, active_dims=4)
    batch = task.batch(size=2_000)
    x, y = batch.inputs[:, ::2], batch.inputs[:, 1::2, -1]
    assert not x[:, :, 4:].any()
    assert not batch.inputs[:, 1::2, :-1].any()
    numbers = x[:, :, :4].double()
    n = numbers.numel()
    # Mean, variance and fourth moment of N(0, 1), within five standard errors.
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        error = 5 * math.sqrt(spread / n)
        assert (numbers**power).mean().item() == pytest.approx(moment, abs=error)
    w = torch.linalg.lstsq(numbers, y.double()[:, :, None]).solution
    torch.testing.assert_close((numbers @ w)[:, :, 0].float(), y, rtol=0, atol=1e-5)
    # w/√d has variance 1/d, and so has y variance 1 over rows.
    assert (w**2).sum(1).mean().item() == pytest.approx(1, abs=5 * math.sqrt(2 / 8_000))
    assert batch.targets[:, ::2, 0].equal(y)
    assert batch.targets[:, 1::2].isnan().all()
    assert batch.links["n_examples"][0].tolist() == list(range(10))
    assert batch.links["query_pos"][0].tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize("options", [{"seq_len": 24, "n_dims": 5}, {"seq_len": 8, "n_dims": 7}])
def test_the_oracle_is_least_squares_of_least_norm(options):
    task = Regression(**options)
    batch = task.batch(size=20)
    x, y = batch.inputs[:, ::2, :-1].double(), batch.inputs[:, 1::2, -1].double()
    answers = task.oracle(batch)[:, ::2, 0]
    assert not answers[:, 0].any()
    for k in range(1, x.shape[1]):
        w = torch.linalg.pinv(x[:, :k]) @ y[:, :k, None]
        expected = (x[:, k] * w[:, :, 0]).sum(-1)
        torch.testing.assert_close(answers[:, k].double(), expected, rtol=1e-4, atol=1e-4)


def test_the_oracles_error_falls_by_one_dimension_an_example():
    task = Regression(seq_len=24, n_dims=8)
    batch = task.batch(split="test", size=4_000)
    error = (task.oracle(batch) - batch.targets)[:, ::2, 0].square().mean(0)
    expected = torch.tensor([max(0.0, 1 - k / 8) for k in range(12)])
    torch.testing.assert_close(error, expected, rtol=0, atol=0.12)
    assert (error[8:] < 1e-6).all()
    assert task.blind_loss == pytest.approx(1, abs=0.15)


def test_shortcuts_err_as_their_formulas_say():
    d = 4
    task = Regression(seq_len=40, n_dims=d)
    batch = task.batch(split="test", size=8_000)
    error = {
        name: (predict(batch) - batch.targets)[:, ::2, 0].square().mean(0)
        for name, predict in task.shortcuts().items()
    }
    n = torch.arange(20)
    # E(w − Xᵀy/n)² = (d + 1)/n of w², and of the best multiple of Xᵀy (d + 1)/(n + d + 1).
    averaging = torch.where(n > 0, (d + 1) / n.clamp(min=1), 1.0)
    torch.testing.assert_close(error["averaging"], averaging, rtol=0.15, atol=0)
    torch.testing.assert_close(error["one gradient step"], (d + 1) / (n + d + 1), rtol=0.1, atol=0)
    # The mean y of one, two, three, then the nearest three of ever more examples.
    row = batch[:1]
    x, y = row.inputs[0, ::2, :d], row.inputs[0, 1::2, -1]
    near = task.shortcuts()["nearest examples"](row)[0, ::2, 0]
    for k in range(1, 20):
        three = (x[:k] - x[k]).square().sum(-1).argsort()[:3]
        assert near[k].item() == pytest.approx(y[three].mean().item(), abs=1e-5)
    assert near[0] == 0


def test_shortcuts_score_what_they_say():
    task = Regression(seq_len=82, n_dims=20)
    batch = task.batch(split="test", size=1_000)
    asked = task.count_asked(batch).sum()
    scores = {
        name: (count_right(predict(batch), batch.targets).sum() / asked).item()
        for name, predict in task.shortcuts().items()
    }
    assert scores["averaging"] < 0
    assert scores["nearest examples"] == pytest.approx(0.16, abs=0.03)
    assert scores["one gradient step"] == pytest.approx(0.58, abs=0.03)
