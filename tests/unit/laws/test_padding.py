"""The law of padding: rounding that positions explain is not a fault."""

import torch
from torch import Tensor

from lab.laws import QUICK, Certification, Verdict
from tests.planted.cached import Cache, CachedAttention


class AnglesOfTable(CachedAttention):
    """Padding takes up positions, and the angles of positions come from a table in fp32."""

    paddings = ("left",)
    cos: Tensor
    sin: Tensor

    def __init__(self):
        super().__init__()
        angles = torch.arange(512)[:, None] * torch.tensor([1.0, 0.01])
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def _compute_positions(self, x: Tensor, before: Cache, keep: Tensor | None) -> Tensor:
        return (before.k.shape[2] + torch.arange(x.shape[1])).expand(x.shape[:2])

    def _get_step_position(self, state: Cache) -> Tensor:
        return torch.full_like(state.position, state.k.shape[2])

    def _rotate_query(self, q: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        first, second = q.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _rotate_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return self._rotate_query(k, positions)


class ValuesOfTable(AnglesOfTable):
    """The same, and values are turned too, so that positions count."""

    def _rotate_value(self, v: Tensor, positions: Tensor) -> Tensor:
        return self._rotate_query(v, positions)


def judge(module: CachedAttention) -> Verdict:
    return Certification(module, QUICK).judge("padding")


def test_a_table_of_angles_in_fp32_is_no_fault():
    torch.manual_seed(0)
    found = judge(AnglesOfTable())
    assert found.verdict == "holds", found
    assert found.measured is not None
    assert found.measured > 1e-10


def test_positions_that_padding_moves_are_one():
    torch.manual_seed(0)
    assert judge(ValuesOfTable()).verdict == "fails"
