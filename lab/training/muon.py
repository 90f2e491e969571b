"""Muon, whose iteration runs once for all matrices of one shape."""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Muon

from lab.training.without_dynamo import WithoutDynamo


class BatchedMuon(WithoutDynamo, Muon):
    """`torch.optim.Muon` with batched products: the same state and, up to rounding, updates.

    torch iterates on one matrix after another, in products too small to use a processor well.
    Tall matrices join wide ones as their transposes. It always has Nesterov momentum, and scales
    its updates to AdamW's ("match_rms_adamw"). On a CPU it iterates in the matrices' own precision,
    where torch takes bf16: processors without bf16 products take twenty times as long for those,
    more than for the rest of a training step (LOG.md).

    Args:
        params: matrices.
        lr: learning rate.
        weight_decay: as in AdamW, not part of the gradient.

    Source: Jordan et al. 2024, "Muon"; the scale is Liu et al. 2025's (arXiv 2502.16982).
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float):
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(tuple(sorted(p.shape)), []).append(p)
            for matrices in by_shape.values():
                self._update(matrices, group)
        return loss

    def _update(self, matrices: list[Tensor], group: dict) -> None:
        """Update matrices of one shape, but for transposition."""
        momentum, lr = group["momentum"], group["lr"]
        updates = []
        for p in matrices:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            assert p.grad is not None
            buffer = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
            update = p.grad.lerp(buffer, momentum)
            updates.append(update.mT if p.shape[0] > p.shape[1] else update)
        stacked = torch.stack(updates)
        if stacked.device.type != "cpu":
            stacked = stacked.bfloat16()
        orthogonal = orthogonalize(
            stacked, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        scale = 0.2 * max(matrices[0].shape) ** 0.5
        for p, update in zip(matrices, orthogonal, strict=True):
            p.mul_(1 - lr * group["weight_decay"])
            update = update.mT if p.shape[0] > p.shape[1] else update
            if isinstance(lr, Tensor):  # reading its value would wait for the GPU
                p.sub_(update * (lr * scale))
            else:
                p.add_(update, alpha=-lr * scale)


def orthogonalize(
    matrices: Float[Tensor, "m rows columns"],
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
) -> Float[Tensor, "m rows columns"]:
    """Return each matrix with singular values near 1, by a Newton–Schulz iteration.

        X ← a X + (b X Xᵀ + c (X Xᵀ)²) X,   from X / |X|

    Args:
        matrices: rows ≤ columns; the products run in their dtype.
        coefficients: a, b and c.
        steps: iterations.
        eps: the least norm that a matrix is divided by.
    """
    a, b, c = coefficients
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
