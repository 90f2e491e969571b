"""Modules whose compiled code or returned matrix differs from forward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.planted.attention import RightAttention, compute_lags, merge
from tests.planted.entry import Fault
from tests.planted.scans import Convolution, LinearAttention


class _OtherGelu(Convolution):
    """When compiled, the nonlinearity approximates the eager one."""

    def _convolve(self, z: Tensor) -> Tensor:
        y = super()._convolve(z)
        return F.gelu(y, approximate="tanh" if torch.compiler.is_compiling() else "none")


class _UnmaskedCompiled(RightAttention):
    """When compiled, the mask is -10 instead of minus infinity."""

    def _weigh(self, scores: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return (scores - 10 * ~self._make_mask(scores.shape[-1])).softmax(dim=-1)
        return super()._weigh(scores)


class _DetachedCompiled(LinearAttention):
    """When compiled, the denominator has no gradient."""

    def _sum_keys(self, k: Tensor) -> Tensor:
        total = super()._sum_keys(k)
        return total.detach() if torch.compiler.is_compiling() else total


class ShownAttention(RightAttention):
    """Attention that returns its matrix."""

    def matrix(self, x: Tensor) -> Tensor:
        """Return the weights [b h t s]."""
        q, k = (self._rotate(self._split(map(x))) for map in (self.query, self.key))
        return self._weigh(self._score(q, k))

    def values(self, x: Tensor) -> Tensor:
        """Return the values [b h s p]."""
        return self._split(self.value(x))

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the output [b t d] of mixed values [b h t p]."""
        return self.out(merge(z))


class _ScaleNotShown(ShownAttention):
    """The returned matrix lacks the scale of the scores."""

    def matrix(self, x: Tensor) -> Tensor:
        q, k = (self._rotate(self._split(map(x))) for map in (self.query, self.key))
        return self._weigh(q @ k.mT)


class _PositionsNotShown(ShownAttention):
    """The returned matrix lacks the rotations."""

    def matrix(self, x: Tensor) -> Tensor:
        q, k = (self._split(map(x)) for map in (self.query, self.key))
        return self._weigh(self._score(q, k))


class _ShownWithoutMask(ShownAttention):
    """The returned matrix is masked after the softmax."""

    def matrix(self, x: Tensor) -> Tensor:
        q, k = (self._rotate(self._split(map(x))) for map in (self.query, self.key))
        return self._score(q, k).softmax(-1) * (compute_lags(x.shape[1]) >= 0)


FORMS = (
    Fault("another gelu when compiled", "forms agree", _OtherGelu, notes="compiled"),
    Fault("finite mask when compiled", "forms agree", _UnmaskedCompiled, notes="compiled"),
    Fault("gradient cut when compiled", "forms agree", _DetachedCompiled, notes="compiled"),
    Fault("scale not in the matrix", "matrix applies", _ScaleNotShown),
    Fault("rotations not in the matrix", "matrix applies", _PositionsNotShown),
    Fault("matrix masked after its softmax", "matrix applies", _ShownWithoutMask),
)
