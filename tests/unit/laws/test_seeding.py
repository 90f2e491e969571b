"""Seeding a part of the work: torch's own numbers within it, and nothing changed after it."""

import pytest
import torch

from lab.seeding import fix_seed

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_it_draws_what_torch_draws_after_manual_seed_and_restores_the_generator(seed):
    before = torch.get_rng_state()
    with fix_seed(seed, CPU):
        drawn = torch.rand(3), torch.nn.functional.dropout(torch.ones(20))
    assert torch.get_rng_state().equal(before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        expected = torch.rand(3), torch.nn.functional.dropout(torch.ones(20))
    assert all(map(torch.equal, drawn, expected))


def test_it_restores_the_generator_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), fix_seed(1, CPU):
        _ = torch.rand(1).item() / 0
    assert torch.get_rng_state().equal(before)
