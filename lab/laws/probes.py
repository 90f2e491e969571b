"""What modules are tried on, and how exactly a module can be expected to answer."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class Probes:
    """What laws try a module on, and how much they may spend.

    Args:
        inputs: each [b t d], shortest first, in the precision and on the device of the module.
        max_len: tokens after which `stable` is content.
        rounding_len: tokens of the input on which `precision` counts roundings; angles and running
            sums go wrong late.
        seconds: what `stable` and `table reach` may take each.
        compiler: torch.compile's backend; None compiles nothing.
    """

    inputs: Sequence[Tensor]
    max_len: int
    rounding_len: int
    seconds: float
    compiler: str | None


def in_double(module: nn.Module, inputs: list[Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """Return a copy of the module in fp64 with its inputs, or in its own precision.

    A module may refuse fp64: by a cast to fp32 inside that meets an fp64 weight, or for a kernel.
    """
    double = deepcopy(module).double()
    try:
        double(inputs[0])
    except (RuntimeError, ValueError):
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        return deepcopy(module), [x.to(dtype) for x in inputs]
    return double, inputs


def noise_floor(module: Callable[[Tensor], Tensor], x: Float[Tensor, "b t d"]) -> float:
    """Return how far rounding moves the module's output, relative to its largest entry.

    Moving x to and fro by h = √eps tells two things: how steep the module is, so how far one
    rounding of x moves it, eps·|y₊ - y|/h, and how far it is from a straight line, |y₊ + y₋ - 2y|,
    which is rounding once curvature, h² = eps, is no larger. The second sees modules that
    compute in a lower precision than they return, and those that are not deterministic.
    """
    with torch.no_grad():
        y = module(x)
        eps = torch.finfo(torch.promote_types(x.dtype, y.dtype)).eps
        step = x * eps**0.5 * draw(x.shape, seed=1).sign().to(x)
        ahead, behind = module(x + step), module(x - step)
    steepness = relative(ahead - y, y) * eps**0.5
    return max(eps, steepness, relative(ahead + behind - 2 * y, y))


def relative(difference: Tensor, reference: Tensor) -> float:
    """Return the largest entry of a difference over that of a reference; NaN stays NaN."""
    if not difference.numel():
        return 0.0
    size, scale = difference.abs().max().item(), reference.abs().max().item()
    if size == 0:
        return 0.0
    return size / scale if scale else float("inf")


def draw(shape: Sequence[int], seed: int) -> Tensor:
    """Return normal numbers in fp64 that depend on shape and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def described(probes: Probes) -> str:
    """Return the words for the inputs: their lengths, and their precision."""
    lengths = ", ".join(str(x.shape[1]) for x in probes.inputs)
    return f"lengths {lengths} in {precision_name(probes.inputs[0].dtype)}"


def precision_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


def longest_input(module: nn.Module, like: Tensor, length: int) -> Tensor:
    """Return one row of the length, or of the largest half, quarter … that the module takes.

    A module with a table of positions refuses what is longer, or looks past the table's end.
    """
    while True:
        x = draw((1, length, like.shape[-1]), seed=length).to(like)
        try:
            with torch.no_grad():
                module(x)
        except (ValueError, IndexError):
            if length == 1:
                raise
            length //= 2
        else:
            return x
