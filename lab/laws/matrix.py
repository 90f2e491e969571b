"""The law of the matrix: what a mixer shows as its matrix is what it applies."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes
from lab.laws.verdict import Trial, Verdict, compared


@runtime_checkable
class MatrixMixer(Protocol):
    """A sequence mixer that can show itself as one matrix a head."""

    def matrix(self, x: Tensor, /) -> Tensor:
        """Return the matrix [b h t s]."""
        ...

    def values(self, x: Tensor, /) -> Tensor:
        """Return what it mixes [b h s p]."""
        ...

    def project(self, x: Tensor, z: Tensor, /) -> Tensor:
        """Return the output [b t d] from the mixed values z [b h t p]."""
        ...


def matrix_applies(module: nn.Module, probes: Probes) -> Verdict:
    """forward(x) = project(x, matrix(x) @ values(x))."""
    if not isinstance(module, MatrixMixer):
        missing = "the module has no matrix, values and project"
        return Verdict("matrix applies", "not applicable", missing)
    return compared("matrix applies", module, probes, _trials)


def _trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    words = "forward(x) is not project(x, matrix(x) @ values(x)) at output {position} of row {row}"
    yield Trial(moved_by_matrix, {}, words)


@torch.no_grad()
def moved_by_matrix(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the shown matrix is applied."""
    y = module(x)
    return module.project(x, module.matrix(x) @ module.values(x)) - y, y
