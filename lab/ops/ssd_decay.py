"""The decay matrix L of state space duality, from sums of log-decay over segments.

    L_ts = exp(Σ_{s<k≤t} a_k) for s ≤ t, else 0;   a_k ≤ 0 is what a state loses in log at token k

Differences of one running sum would give the same L, but they cancel: at 2,048 tokens about a
hundred times less exact. So in fp64 each segment is summed by itself. In fp32 differences of a
running sum in fp64 are exact, and much faster. What is not causal is masked before exp, or bounded:
there exp could overflow, and infinity times the mask's zero is NaN.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lab.ops.derivatives import needs_plain

FORGOTTEN = -128.0
"""Below this log-decay exp is 0 in fp32. Decays below it are all alike, and would only cost a
running sum its digits."""


def decay_matrix(log_decay: Float[Tensor, "*batch t"]) -> Float[Tensor, "*batch t s"]:
    """Return L, 0 ≤ L ≤ 1 with ones on the diagonal, from log-decays ≤ 0.

    Its memory is laid out source-major: the sums run along target time, fastest when adjacent.

    Source: lst:ssd_helper.
    """
    if needs_plain():
        return segment_sums(log_decay).exp()
    return _DecayMatrix.apply(log_decay).mT


def decay_gradient(P: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch t"]:
    """Return the gradient of the log-decays from P, the gradient of log L where causal.

    Token k is in the segments that begin before it and do not end before it:
    ∂a_k = Σ_{t≥k} Σ_{s<k} P_ts. Sums of P's rows less sums of its columns would give it too, but
    they cancel where a segment's neighbours weigh more than itself.
    """
    ones = torch.ones_like(P[(0,) * (P.ndim - 2)])
    return (P.mT @ ones.tril()).mul_(ones.triu(1)).sum(-2)


def segment_sums(log_decay: Float[Tensor, "*batch t"]) -> Float[Tensor, "*batch t s"]:
    """Return log L, −∞ where not causal; its exp is the reference for `decay_matrix`."""
    t = log_decay.shape[-1]
    causal = torch.ones(t, t, dtype=torch.bool, device=log_decay.device).tril()
    in_segment = causal.tril(-1)
    steps = log_decay[..., :, None].expand(*log_decay.shape, t).where(in_segment, 0)
    return steps.cumsum(-2).masked_fill(~causal, -torch.inf)


class _DecayMatrix(torch.autograd.Function):
    """Lᵀ [s t] computed in place, where autograd would keep each step."""

    @staticmethod
    def forward(ctx, log_decay):
        single = log_decay.dtype != torch.float64
        L = _subtract_sums(log_decay) if single else _add_steps(log_decay)
        ctx.save_for_backward(L)
        return L

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (L,) = ctx.saved_tensors
        return decay_gradient((grad * L).mT)


def _add_steps(log_decay):
    t = log_decay.shape[-1]
    L = log_decay[..., None, :].expand(*log_decay.shape, t).triu(1)
    return L.cumsum_(-1).exp_().triu_()


def _subtract_sums(log_decay):
    """Return Lᵀ from a running sum in fp64, in two parts of the dtype of the log-decays.

    The difference of the large parts is rounded as a segment's own sum would be. A sum that is NaN
    is 0 where segments begin, so that targets before it stay as they are.
    """
    running = log_decay.double().clamp(min=FORGOTTEN).cumsum(-1)
    large = running.to(log_decay.dtype)
    small = (running - large).to(log_decay.dtype)
    L = large[..., None, :] - large.nan_to_num()[..., :, None]
    L.add_(small[..., None, :]).sub_(small.nan_to_num()[..., :, None])
    L.clamp_(max=0).exp_()
    return L.mul_(torch.ones_like(L[(0,) * (L.ndim - 2)]).triu())
