"""Muon, whose iteration runs once for all matrices of one shape, of one model or of several."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Muon

from lab.training.without_dynamo import WithoutDynamo
from tasks.one_thread import use_one_thread


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
        update_matrices([self])
        return loss


class _Matrix(NamedTuple):
    """A parameter, its gradient and momentum, and by what its step and its decay are multiplied."""

    p: Tensor
    gradient: Tensor
    momentum: Tensor
    rate: float | Tensor
    kept: float | Tensor

    def turn(self, z: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as a wide matrix, or back."""
        return z.mT if self.p.shape[0] > self.p.shape[1] else z


@torch.no_grad()
def update_matrices(optimizers: Sequence[BatchedMuon]) -> None:
    """Take a step of several optimizers, which may differ in their rates and decays alone."""
    by_shape: dict[tuple[int, ...], list[_Matrix]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["lr"]
            kept = 1 - rate * group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = optimizer.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                matrix = _Matrix(p, p.grad, state["momentum_buffer"], rate, kept)
                by_shape.setdefault(tuple(sorted(p.shape)), []).append(matrix)
    for matrices in by_shape.values():
        with use_one_thread(len(matrices) * matrices[0].p.numel()):
            _update(matrices, optimizers[0].param_groups[0])


def _update(matrices: Sequence[_Matrix], group: dict[str, Any]) -> None:
    """Update matrices of one shape, but for transposition."""
    parameters, gradients, buffers, rates, kept = map(list, zip(*matrices, strict=True))
    lerp, lerp_, copy_ = (getattr(torch, f"_foreach_{name}") for name in ("lerp", "lerp_", "copy_"))
    lerp_(buffers, gradients, 1 - group["momentum"])
    updates = lerp(gradients, buffers, group["momentum"])
    stacked = torch.stack([z.turn(update) for z, update in zip(matrices, updates, strict=True)])
    if stacked.device.type != "cpu":
        stacked = stacked.bfloat16()
    orthogonal = orthogonalize(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
    scale = 0.2 * max(parameters[0].shape) ** 0.5
    if isinstance(rates[0], Tensor):  # reading a value would wait for the GPU
        before = torch.stack([z.turn(z.p) for z in matrices])
        kept, rates = (torch.stack(each)[:, None, None] for each in (kept, rates))
        after = before * kept - orthogonal * (rates * scale)
        copy_(parameters, [z.turn(new) for z, new in zip(matrices, after, strict=True)])
        return
    for z, update in zip(matrices, orthogonal, strict=True):
        z.p.mul_(z.kept).add_(z.turn(update), alpha=-z.rate * scale)


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
