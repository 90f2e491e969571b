"""Compiled code and shown matrices that are not what forward does."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.bench.calibration.attention import Attention, behind, merge
from lab.bench.calibration.entry import Fault
from lab.bench.calibration.scans import Convolution, LinearAttention


class _OtherGelu(Convolution):
    """Compiled, the nonlinearity is an approximation of the eager one."""

    def _convolved(self, z: Tensor) -> Tensor:
        y = super()._convolved(z)
        return F.gelu(y, approximate="tanh" if torch.compiler.is_compiling() else "none")


class _UnmaskedCompiled(Attention):
    """Compiled, a mask of -10 stands for minus infinity."""

    def _weights(self, scores: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return (scores - 10 * ~self._seen(scores.shape[-1])).softmax(dim=-1)
        return super()._weights(scores)


class _DetachedCompiled(LinearAttention):
    """Compiled, the denominator is left out of the gradient."""

    def _total(self, k: Tensor) -> Tensor:
        total = super()._total(k)
        return total.detach() if torch.compiler.is_compiling() else total


class ShownAttention(Attention):
    """Attention that shows its matrix."""

    def matrix(self, x: Tensor) -> Tensor:
        """Return the weights [b h t s]."""
        q, k = (self._turned(self._split(map(x))) for map in (self.query, self.key))
        return self._weights(self._scores(q, k))

    def values(self, x: Tensor) -> Tensor:
        """Return the values [b h s p]."""
        return self._split(self.value(x))

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the output [b t d] of mixed values [b h t p]."""
        return self.out(merge(z))


class _ScaleNotShown(ShownAttention):
    """The shown matrix lacks the scale of the scores."""

    def matrix(self, x: Tensor) -> Tensor:
        q, k = (self._turned(self._split(map(x))) for map in (self.query, self.key))
        return self._weights(q @ k.mT)


class _PositionsNotShown(ShownAttention):
    """The shown matrix lacks the rotations."""

    def matrix(self, x: Tensor) -> Tensor:
        q, k = (self._split(map(x)) for map in (self.query, self.key))
        return self._weights(self._scores(q, k))


class _ShownWithoutMask(ShownAttention):
    """The shown matrix is that of the scores before the mask, cut off below the diagonal."""

    def matrix(self, x: Tensor) -> Tensor:
        q, k = (self._turned(self._split(map(x))) for map in (self.query, self.key))
        return self._scores(q, k).softmax(-1) * (behind(x.shape[1]) >= 0)


FORMS = (
    Fault("another gelu when compiled", "forms agree", _OtherGelu, notes="compiled"),
    Fault("finite mask when compiled", "forms agree", _UnmaskedCompiled, notes="compiled"),
    Fault("gradient cut when compiled", "forms agree", _DetachedCompiled, notes="compiled"),
    Fault("scale not in the matrix", "matrix applies", _ScaleNotShown),
    Fault("rotations not in the matrix", "matrix applies", _PositionsNotShown),
    Fault("matrix masked after its softmax", "matrix applies", _ShownWithoutMask),
)
