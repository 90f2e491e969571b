"""The law of the matrix: what a mixer shows as its matrix is what it applies."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, relative
from lab.laws.verdict import Errors, Verdict, compared


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
    return compared("matrix applies", module, probes, _errors)


def _errors(module: nn.Module, x: Tensor) -> Errors:
    assert isinstance(module, MatrixMixer)
    with torch.no_grad():
        y = module(x)
        applied = module.project(x, module.matrix(x) @ module.values(x))
        yield relative(applied - y, y), "forward(x) is not project(x, matrix(x) @ values(x))"
