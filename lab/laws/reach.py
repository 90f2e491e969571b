"""Whether a parameter gets a gradient: from any probe, and however ties are broken."""

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from lab.laws.probes import draw
from lab.laws.ties import Ties
from lab.seeding import fix_seed

Reach = Literal["alive", "zero", "tie-only", "none"]

SEEDS = 3
BREAKINGS = 8
"""Orders in which ties are broken; of k rows chosen among n, all 8 keep one with chance (k/n)⁸."""


def reach(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Reach]:
    """Return for each trainable parameter whether any probe gives it a gradient.

    "none": no path leads from the output to it; "zero": a path does, but the gradient is rounding
    (less than 64 units in the last place of the largest of all gradients); otherwise "alive". Ties
    are broken as torch breaks them.
    """
    sizes = compute_gradients(module, inputs)
    floor = find_floor(sizes, inputs[0].dtype)
    return {name: classify(size, floor) for name, size in sizes.items()}


def compute_gradients(
    module: nn.Module,
    inputs: Sequence[Tensor],
    mode: Ties | None = None,
) -> dict[str, Tensor | None]:
    """Return for each trainable parameter the largest gradient of each entry over all probes.

    None where no path leads to it. The input requires a gradient too, as it does inside a network:
    otherwise a checkpointed module gives its parameters none.
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad and p.numel()}
    largest: dict[str, Tensor | None] = dict.fromkeys(parameters)
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for x in inputs if parameters else ():
            for seed in range(SEEDS):
                for p in parameters.values():
                    p.grad = None
                with fix_seed(seed, x.device), mode or nullcontext():
                    y = module(draw_input(x, seed))
                    if y.requires_grad:
                        # A sum, because backward(weights) imports sympy, which takes seconds.
                        (y * draw(y.shape, seed + SEEDS).to(y)).sum().backward()
                for name, p in parameters.items():
                    largest[name] = _take_larger(largest[name], p.grad)
    finally:
        for name, p in parameters.items():
            p.grad = before[name]
    return largest


def find_tie_only(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[str], list[str]]:
    """Return parameters of which no row keeps a gradient however ties are broken, and the ties.

    A row is one index into all axes but the last; with one axis, an entry.
    """
    scan = Ties(0, id(sys._getframe()))
    try:
        with torch.no_grad(), fix_seed(0, inputs[0].device), scan:
            module(draw_input(inputs[0], 0))
        if not scan.places:
            return [], []
        built = _find_alive_rows(module, inputs)
        kept = built
        for order in range(BREAKINGS):
            rows = _find_alive_rows(module, inputs, Ties(order))
            kept = {name: kept[name] & rows[name] for name in kept if name in rows}
            if all(torch.equal(kept[name], built[name]) for name in kept):
                return [], scan.places
    except Exception:  # the module relies on torch's order: ties cannot be judged
        return [], []
    alone = [name for name in kept if built[name].any() and not kept[name].any()]
    return alone, scan.places


def _find_alive_rows(
    module: nn.Module, inputs: Sequence[Tensor], mode: Ties | None = None
) -> dict[str, Bool[Tensor, "..."]]:
    sizes = compute_gradients(module, inputs, mode=mode)
    floor = find_floor(sizes, inputs[0].dtype)
    alive = {name: size > floor for name, size in sizes.items() if size is not None}
    return {name: a.any(dim=-1) if a.ndim > 1 else a for name, a in alive.items()}


def draw_input(like: Tensor, seed: int) -> Tensor:
    """Return a probe that requires a gradient and may be written to."""
    return draw(like.shape, seed).to(like).requires_grad_().clone()


def _take_larger(largest: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return largest
    size = (grad.to_dense() if grad.is_sparse else grad).abs()
    return size if largest is None else torch.maximum(largest, size)


def find_floor(sizes: dict[str, Tensor | None], dtype: torch.dtype) -> float:
    """Return the size below which a gradient is rounding."""
    largest = (size.max().item() for size in sizes.values() if size is not None)
    finite = [size for size in largest if math.isfinite(size)]
    return 64 * torch.finfo(dtype).eps * max(finite, default=0.0)


def classify(size: Tensor | None, floor: float) -> Reach:
    """Return how a parameter is reached, by the sizes of its gradient."""
    if size is None:
        return "none"
    return "alive" if (size > floor).any() else "zero"
