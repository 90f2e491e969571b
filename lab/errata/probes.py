"""Inputs, layers with seeded weights, and gradients for the errata."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from lab.laws.probes import draw

M = TypeVar("M", bound=nn.Module)


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers in fp64 that depend on shape and seed alone."""
    return draw(shape, seed)


def build_seeded(build: Callable[[], M]) -> M:
    """Build a layer in fp64 with the same weights each time; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


def compute_gradients(module: nn.Module, x: Tensor) -> dict[str, float | None]:
    """Return each parameter's largest gradient, or None if no path leads to it."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    y = module(x)
    grads = torch.autograd.grad(y, parameters, draw_normal(*y.shape, seed=1), allow_unused=True)
    return {
        name: None if grad is None else grad.abs().max().item()
        for name, grad in zip(names, grads, strict=True)
    }


def measure_gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of the second."""
    return ((a - b).abs().max() / b.abs().max()).item()
