"""The law of the matrix: the matrix that a mixer returns is the one it applies."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lab.laws.comparison import Trial, run_trials
from lab.laws.law import Law
from lab.laws.probes import Probes
from lab.laws.verdict import Verdict


@runtime_checkable
class MatrixMixer(Protocol):
    """A sequence mixer that can return its mixing as one matrix per head."""

    def matrix(self, x: Tensor, /) -> Tensor:
        """Return the matrix [b h t s]."""
        ...

    def values(self, x: Tensor, /) -> Tensor:
        """Return the values that it mixes [b h s p]."""
        ...

    def project(self, x: Tensor, z: Tensor, /) -> Tensor:
        """Return the output [b t d] from the mixed values z [b h t p]."""
        ...


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """forward(x) = project(x, matrix(x) @ values(x))."""
    if not isinstance(module, MatrixMixer):
        missing = "the module has no matrix, values and project"
        return Verdict(LAW.name, "not applicable", missing)
    return run_trials(LAW.name, module, probes, _list_trials)


LAW = Law("matrix applies", judge, conditions="evaluating", seeded=False)


def _list_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    words = "forward(x) is not project(x, matrix(x) @ values(x)) at output {position} of row {row}"
    yield Trial(compare_matrix, {}, words)


@torch.no_grad()
def compare_matrix(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the returned matrix is applied."""
    y = module(x)
    return module.project(x, module.matrix(x) @ module.values(x)) - y, y
