"""Custom autograd functions, right and wrong, and modules that call one."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.planted.scans import Convolution


class _Swish(Function):
    """x · sigmoid(x), with its derivatives."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        (x,) = args
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangents[0] * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))


class _FirstTerm(_Swish):
    """The backward pass lacks the product rule's second term."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.sigmoid()


class _FromOutput(_Swish):
    """The backward pass is a thousandth too large where x is above 1."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grads[0] * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))
        return grad * (1 + 1e-3 * (x > 1))


class _FirstOfChunk(_Swish):
    """The backward pass works in chunks of 64 and loses the first token of all but the first."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = _Swish.backward(ctx, *grads)
        place = torch.arange(grad.shape[-1], device=grad.device)
        return grad * ((place % 64 > 0) | (place == 0))


class _HalfTangent(_Swish):
    """The forward mode lacks the product rule's second term; the backward pass is right."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangents[0] * x.sigmoid()


class _Once(_Swish):
    """The gradient is right, and leaves the graph: `once_differentiable` complains too rarely."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
        return _Swish.backward(ctx, *grads)


class _DetachedSwish(_Swish):
    """The gradient is right, and what it computes from x counts as constant."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.detach().sigmoid()
        return grads[0] * (s + x.detach() * s * (1 - s))


class _Rounded(Function):
    """Rounds to a tenth; its gradient passes straight through, by design."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return (10 * args[0]).round() / 10

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Reversed(Function):
    """Returns its input and reverses its gradient, by design."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class CustomBackward(Convolution):
    """A causal convolution, then a custom function."""

    function: type[Function] = _Swish

    def _convolve(self, z: Tensor) -> Tensor:
        y = self.function.apply(super()._convolve(z))
        assert isinstance(y, Tensor)
        return y


class StraightThrough(CustomBackward):
    """Rounded values with a surrogate gradient."""

    function = _Rounded


class ReversedGradient(CustomBackward):
    """A reversed gradient, as adversarial training uses."""

    function = _Reversed
