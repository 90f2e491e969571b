"""Causal depthwise convolution, with the tail of inputs that the next token needs.

Axis letters of this file, besides the package's: c channel, w tap (width − 1 of them in a tail).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.ops.derivatives import differentiate, needs_plain


class CausalConvolution(nn.Module):
    """Each channel's weighted sum of its own last inputs: y_t = bias + Σ_k w_k ⊙ x_{t−width+1+k}.

    Before the first token come zeros, or the tail: the width − 1 inputs that came last.

    Args:
        channels: c, ≥ 1.
        width: inputs in a sum, the token's own among them, ≥ 1.
        bias: whether a bias is added.

    Raises:
        ValueError: for channels or a width below 1.

    Source: § Related Work, position by convolution.
    """

    bias: nn.Parameter
    """None without a bias."""

    def __init__(self, channels: int, width: int = 4, *, bias: bool = True):
        super().__init__()
        for field, value in (("channels", channels), ("width", width)):
            if value < 1:
                raise ValueError(f"{field}={value} must be at least 1")
        self.width = width
        # Drawn as nn.Conv1d draws it; the last column is the token's own.
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-1, 1) * width**-0.5)
        drawn = torch.empty(channels).uniform_(-1, 1) * width**-0.5 if bias else None
        self.register_parameter("bias", None if drawn is None else nn.Parameter(drawn))

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        tail: Float[Tensor, "b w c"] | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b w c"]]:
        """Return the sums and the new tail, both in x's dtype.

        Args:
            x: inputs.
            tail: inputs before x's, width − 1 of them, the latest last; None: zeros.
            keep: where False, the token is left out, as if its row were that much shorter; what
                comes out there means nothing.

        Raises:
            ValueError: for a tail of another shape.
        """
        b, t, c = x.shape
        if tail is None:
            tail = x.new_zeros(b, self.width - 1, c)
        if tail.shape != (b, self.width - 1, c):
            raise ValueError(f"tail is {list(tail.shape)}, must be {[b, self.width - 1, c]}")
        if keep is None:
            inputs = torch.cat([tail, x], dim=1)
            # A view would keep all inputs alive for as long as the tail is carried.
            return self._sums(inputs), inputs[:, t:].clone()
        # Kept tokens move together to the front, where each finds those before it.
        order = (~keep).long().argsort(dim=1, stable=True)
        inputs = torch.cat([tail, x.take_along_dim(order[..., None], dim=1)], dim=1)
        y = self._sums(inputs).take_along_dim(order.argsort(dim=1)[..., None], dim=1)
        last = keep.sum(1, keepdim=True) + torch.arange(self.width - 1, device=x.device)
        return y, inputs.take_along_dim(last[..., None], dim=1)

    def _sums(self, inputs: Float[Tensor, "b s c"]) -> Float[Tensor, "b t c"]:
        bias = inputs.new_zeros(()) if self.bias is None else self.bias.to(inputs)
        return _sum_shifted(inputs, self.weight.to(inputs), bias)


def _sum_shifted(inputs, weight, bias):
    if needs_plain():
        return _sum_plainly(inputs, weight, bias)
    return _Sums.apply(inputs, weight, bias)


def _sum_plainly(inputs, weight, bias):
    return (inputs.unfold(1, weight.shape[1], 1) * weight).sum(-1) + bias


class _Sums(torch.autograd.Function):
    """The sums as `width` passes over shifted inputs [b t+width−1 c], and as many back.

    Three times as fast as F.conv1d on a CPU: channels stay last, and autograd would pad the
    gradient of every shift by itself.
    """

    @staticmethod
    def forward(ctx, inputs, weight, bias):
        ctx.save_for_backward(inputs, weight, bias)
        taps = weight.mT.contiguous()
        t = inputs.shape[1] - len(taps) + 1
        y = torch.addcmul(bias, inputs[:, :t], taps[0])
        for k, tap in enumerate(taps[1:], 1):
            y.addcmul_(inputs[:, k : k + t], tap)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        inputs, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiate(_sum_plainly, (inputs, weight, bias), (grad,))
        taps, t = weight.mT.contiguous(), grad.shape[1]
        to_inputs, to_taps = torch.zeros_like(inputs), []
        for k, tap in enumerate(taps):
            shifted = slice(k, k + t)
            to_inputs[:, shifted].addcmul_(grad, tap)
            to_taps.append((inputs[:, shifted] * grad).sum((0, 1)))
        return to_inputs, torch.stack(to_taps, dim=-1), grad.sum((0, 1)) if bias.ndim else None
