"""Which optimizer trains which parameters, and Muon with batched products."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from lab.config import TrainConfig
from lab.models import LanguageModel
from tasks.one_thread import use_one_thread


class WithoutDynamo:
    """The methods that `torch.optim.Optimizer` has wrapped to exclude them from compilation.

    The wrappers import torch._dynamo, which takes some two seconds at the start of every process
    that trains. The lab compiles models only, never an optimizer's methods.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(WithoutDynamo, torch.optim.AdamW):
    """`torch.optim.AdamW`, bit for bit; small tensors are updated on one thread."""

    _take_step: Any = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        sizes = [p.numel() for group in self.param_groups for p in group["params"]]
        with use_one_thread(sum(sizes) // max(1, len(sizes))):
            return self._take_step(closure)


def build_optimizers(model: LanguageModel, config: TrainConfig) -> dict[str, Optimizer]:
    """Return the optimizers of a configuration, by name.

    Muon updates the weights of the linear layers that `muon_on` names; its step is scaled to
    AdamW's, so that one learning rate serves both. AdamW updates everything else. In the first
    stage the embedding and the head learn at `table_learning_rate`. Weight decay applies to tensors
    of two dimensions or more.
    """
    linear = {id(weight) for weight in _list_linear_weights(model, config.muon_on)}
    ends = {id(model.embed.weight), id(model.head.weight)}
    muon, tables, matrices, vectors = [], [], [], []
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if config.optimizer == "muon" and id(p) in linear:
            muon.append(p)
        elif config.table_learning_rate is not None and id(p) in ends:
            tables.append(p)
        elif p.ndim >= 2:
            matrices.append(p)
        else:
            vectors.append(p)
    rate, decay = config.learning_rate, config.weight_decay
    faster = (config.table_learning_rate or rate) / rate
    groups = [
        {"params": tables, "weight_decay": decay, "rate": faster},
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: dict[str, Optimizer] = {}
    if groups:
        optimizers["adamw"] = AdamW(
            groups, lr=rate, betas=(0.9, 0.999), weight_decay=decay, fused=True
        )
    if muon:
        optimizers["muon"] = BatchedMuon(muon, lr=rate, weight_decay=decay)
    return optimizers


def _list_linear_weights(model: LanguageModel, layers: str) -> list[nn.Parameter]:
    """Return the weights of the linear layers of the mixers, of the MLPs, or of all."""
    weights = []
    for block in model.blocks:
        chosen = {"all": block, "mixers": block.mixer, "mlps": block.mlp}[layers]
        if chosen is not None:
            weights += [m.weight for m in chosen.modules() if isinstance(m, nn.Linear)]
    return weights


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
            by_shape: dict[tuple[int, ...], list[_Matrix]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                matrix = _Matrix(p, p.grad, state["momentum_buffer"])
                by_shape.setdefault(tuple(sorted(p.shape)), []).append(matrix)
            for matrices in by_shape.values():
                with use_one_thread(len(matrices) * matrices[0].p.numel()):
                    _update(matrices, group)
        return loss


class _Matrix(NamedTuple):
    """A parameter, its gradient and its momentum."""

    p: Tensor
    gradient: Tensor
    momentum: Tensor

    def turn(self, z: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as a wide matrix, or back."""
        return z.mT if self.p.shape[0] > self.p.shape[1] else z


def _update(matrices: Sequence[_Matrix], group: dict[str, Any]) -> None:
    """Update matrices of one shape, but for transposition."""
    parameters, gradients, buffers = map(list, zip(*matrices, strict=True))
    lerp, lerp_, copy_ = (getattr(torch, f"_foreach_{name}") for name in ("lerp", "lerp_", "copy_"))
    lerp_(buffers, gradients, 1 - group["momentum"])
    updates = lerp(gradients, buffers, group["momentum"])
    stacked = torch.stack([z.turn(update) for z, update in zip(matrices, updates, strict=True)])
    if stacked.device.type != "cpu":
        stacked = stacked.bfloat16()
    orthogonal = orthogonalize(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
    rate, scale = group["lr"], 0.2 * max(parameters[0].shape) ** 0.5
    kept = 1 - rate * group["weight_decay"]
    if isinstance(rate, Tensor):  # reading its value would wait for the GPU
        before = torch.stack([z.turn(z.p) for z in matrices])
        after = before * kept - orthogonal * (rate * scale)
        copy_(parameters, [z.turn(new) for z, new in zip(matrices, after, strict=True)])
        return
    for z, update in zip(matrices, orthogonal, strict=True):
        z.p.mul_(kept).add_(z.turn(update), alpha=-rate * scale)


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
