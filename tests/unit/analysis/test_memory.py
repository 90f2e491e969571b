"""What memory is foretold covers what is taken, and grows as it should."""

import pytest
import torch
from torch import nn

from analysis.memory import check_memory, estimate_memory
from lab.models import build


class Whole(nn.Module):
    """A mixer that can only give its whole matrix."""

    def __init__(self, d_model: int):
        super().__init__()

    def forward(self, x):
        return x

    def matrix(self, x):
        return torch.eye(x.shape[1]).expand(len(x), 1, -1, -1)

    def values(self, x):
        return x[:, None]

    def project(self, x, z):
        return z[:, 0]


@pytest.fixture
def foreign(monkeypatch):
    monkeypatch.setattr("lab.models.architectures.load_class", lambda path: Whole)
    return build("UM", vocab_size=32, d_model=16, model="tests:Whole")


def test_rows_and_width_cost_in_proportion():
    small = build("AM", vocab_size=32, d_model=16)
    wide = build("AM", vocab_size=32, d_model=64)
    base = estimate_memory(small, 1, 1)
    assert estimate_memory(small, 9, 4096) - base == pytest.approx(
        9 * (estimate_memory(small, 1, 4096) - base), rel=1e-3
    )
    assert estimate_memory(wide, 9, 4096) > 3 * estimate_memory(small, 9, 4096) - 3 * base


def test_a_whole_matrix_is_counted_only_where_a_mixer_has_nothing_else(foreign):
    own = build("AM", vocab_size=32, d_model=16)
    assert estimate_memory(foreign, 1, 65_536) > 65_536**2 * 4
    assert estimate_memory(own, 1, 65_536) < 65_536**2


def test_how_many_rows_would_fit():
    model = build("AM", vocab_size=32, d_model=16)
    limit = estimate_memory(model, 5, 4096)
    check_memory(model, 5, 4096, limit)
    with pytest.raises(ValueError, match=r"rows=6 of 4,096 tokens .* 5 rows would fit"):
        check_memory(model, 6, 4096, limit)
