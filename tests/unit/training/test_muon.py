"""Batched Muon against torch's, which updates one matrix after another."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from lab.training.optimizers import BatchedMuon, orthogonalize

SHAPES = ((16, 16), (16, 48), (48, 16), (16, 16), (8, 16))


def draw_matrices():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def take_steps(optimizer, matrices, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in matrices:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def make_pair(decay=0.1):
    mine, theirs = draw_matrices(), draw_matrices()
    batched = BatchedMuon(mine, lr=0.01, weight_decay=decay)
    single = torch.optim.Muon(theirs, lr=0.01, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return mine, batched, theirs, single


def assert_near(mine, theirs):
    # torch iterates in bf16, after which entries of the orthogonal matrix are off by up to 2⁻⁶; a
    # step adds them times 0.2 · lr · √(longer side). Three steps move an entry by about 0.6 · lr.
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=3 * 0.2 * 0.01 * 48**0.5 * 2.0**-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_its_steps_are_torchs(decay):
    mine, batched, theirs, single = make_pair(decay)
    take_steps(batched, mine, 0, 3)
    take_steps(single, theirs, 0, 3)
    assert_near(mine, theirs)


def test_it_goes_on_from_torchs_state():
    mine, batched, theirs, single = make_pair()
    take_steps(single, theirs, 0, 3)
    batched.load_state_dict(deepcopy(single.state_dict()))
    for p, q in zip(mine, theirs, strict=True):
        p.data.copy_(q.data)
    take_steps(batched, mine, 3, 5)
    take_steps(single, theirs, 3, 5)
    assert_near(mine, theirs)


def test_matrices_of_a_stack_do_not_mix():
    matrices = torch.randn(3, 6, 10, dtype=torch.float64)
    settings = (3.4445, -4.775, 2.0315), 5, 1e-7
    together = orthogonalize(matrices, *settings)
    apart = torch.cat([orthogonalize(m[None], *settings) for m in matrices])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)
    assert torch.linalg.svdvals(together).sub(0.95).abs().max() < 0.3


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_on_a_cpu_it_iterates_in_the_matrices_precision(dtype, atol):
    p = nn.Parameter(torch.zeros(6, 10, dtype=dtype))
    p.grad = torch.randn(6, 10, dtype=dtype, generator=torch.Generator().manual_seed(0))
    BatchedMuon([p], lr=1.0, weight_decay=0.0).step()
    exact = orthogonalize(p.grad.double()[None], (3.4445, -4.775, 2.0315), 5, 1e-7)[0]
    expected = -0.2 * 10**0.5 * exact
    torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=atol)


def test_a_matrix_without_a_gradient_stays():
    mine, batched, _, _ = make_pair()
    before = mine[1].clone()
    take_steps(batched, mine[:1] + mine[2:], 0, 1)
    assert torch.equal(mine[1], before)


def test_rates_may_be_tensors():
    mine, batched, _, _ = make_pair()
    others, plain, _, _ = make_pair()
    batched.param_groups[0]["lr"] = torch.tensor(0.01, dtype=torch.float64)
    take_steps(batched, mine, 0, 3)
    take_steps(plain, others, 0, 3)
    for p, q in zip(mine, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)
