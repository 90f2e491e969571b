"""What the comparisons with public modules share."""

import random
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lab import peers
from tests.normal import draw_normal

M = TypeVar("M", bound=nn.Module)

ROUNDINGS = 64
"""Behind each number stand sums of tens of terms, whose roundings mostly cancel."""


SHAPES = range(50)
"""Seeds of `draw_shape`."""


def draw_shape(seed: int) -> tuple[int, int, int, int]:
    """Return batch, heads, tokens and width of a head, drawn from a seed."""
    draw = random.Random(seed)
    return draw.randint(1, 3), draw.randint(1, 4), draw.randint(2, 40), draw.randint(1, 8)


def modules(family: str) -> ModuleType:
    """transformers' module of a family's layers."""
    return peers.load(f"transformers.models.{family}.modeling_{family}")


def config(family: str, d_model: int, **options: Any) -> Any:
    """transformers' configuration of a family's layers."""
    configurations = peers.load(f"transformers.models.{family}.configuration_{family}")
    return getattr(configurations, f"{family.capitalize()}Config")(hidden_size=d_model, **options)


def deviation(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    difference = (actual.double() - expected.double()).abs().max()
    return (difference / expected.abs().max()).item()


def draw_parameters(module: M, dtype: torch.dtype = torch.float64) -> M:
    """Draw all parameters, so that none is where a term of a formula cannot be seen."""
    for seed, parameter in enumerate(module.parameters()):
        wide = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        parameter.data = wide * draw_normal(*parameter.shape, dtype=dtype, seed=seed)
    return module.to(dtype)


def assert_agree(
    ours: nn.Module,
    weights: Mapping[str, Tensor],
    theirs: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    roundings: float = ROUNDINGS,
) -> None:
    """Hold our module, on their weights, against `run`: values, and all of their gradients.

    Args:
        ours: called with `weights` in place of its parameters.
        weights: by the names of ours, made from the parameters of theirs.
        theirs: whose parameters' gradients are compared.
        run: calls theirs.
        x: the input; gradients to it are compared too.
        roundings: bound on the deviation, in units of x's precision.
    """
    missing = {name for name, _ in ours.named_parameters()} - set(weights)
    assert not missing, f"no weights for {missing}"
    x = x.requires_grad_()
    inputs = {"x": x, **dict(theirs.named_parameters())}
    results = functional_call(ours, dict(weights), (x,)), run(x)
    weight = draw_normal(*results[0].shape, dtype=x.dtype, seed=1)
    gradients = [torch.autograd.grad((y * weight).sum(), list(inputs.values())) for y in results]
    far = {"y": deviation(*results)}
    for name, a, b in zip(inputs, *gradients, strict=True):
        far[name] = deviation(a, b)
    tolerance = roundings * torch.finfo(x.dtype).eps / 2
    far = {name: value for name, value in far.items() if not value <= tolerance}
    assert not far, f"deviate by more than {tolerance:.1e}: {far}"
