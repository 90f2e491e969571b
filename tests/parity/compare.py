"""What the comparisons with public modules share."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.func import functional_call

from lab import peers
from tests.normal import draw_normal

M = TypeVar("M", bound=nn.Module)

ROUNDINGS = 64
"""Behind each number stand sums of tens of terms, whose roundings mostly cancel."""


class Shape(NamedTuple):
    """What a comparison of mixers is made for.

    Attributes:
        seed: of which options may be made, too.
        b: batch.
        h: heads.
        t: tokens.
        p: width of a head.
        dtype: of weights and input.
    """

    seed: int
    b: int
    h: int
    t: int
    p: int
    dtype: torch.dtype

    @property
    def d(self) -> int:
        """Width of the mixer."""
        return self.h * self.p

    def heads(self, z: Tensor) -> Tensor:
        """Split channels into heads."""
        return rearrange(z, "b t (h n) -> b t h n", h=self.h)

    def draw(self, module: M) -> M:
        """Draw all parameters of a module, in this precision."""
        return draw_parameters(module, self.dtype)


def draw_shape(seed: int, dtype: torch.dtype, least: int = 1, multiple: int = 1) -> Shape:
    """Draw a shape from a seed, whose heads are a multiple of a width, and at least one."""
    draw = random.Random(seed)
    b, h, t = draw.randint(1, 3), draw.randint(1, 4), draw.randint(2, 40)
    return Shape(seed, b, h, t, multiple * (least - 1 + draw.randint(1, 8)), dtype)


class Comparison(NamedTuple):
    """A mixer of ours, and how its reference computes the same.

    Attributes:
        ours: the mixer.
        weights: of theirs, by the names of ours.
        theirs: the module whose parameters those are; ours, where the reference has none.
        run: the reference, as a function of x.
    """

    ours: nn.Module
    weights: Mapping[str, Tensor]
    theirs: nn.Module
    run: Callable[[Tensor], Tensor]


def compare_with(ours: nn.Module, run: Callable[[Tensor], Tensor]) -> Comparison:
    """Return a comparison with a formula of our own weights."""
    return Comparison(ours, dict(ours.named_parameters()), ours, run)


@contextmanager
def keep_precision() -> Iterator[None]:
    """Let a reference that casts to fp32 compute in fp64."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


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
    *,
    together: bool = False,
) -> None:
    """Hold our module, on their weights, against `run`: values, and all of their gradients.

    Args:
        ours: called with `weights` in place of its parameters.
        weights: by the names of ours, made from the parameters of theirs.
        theirs: whose parameters' gradients are compared.
        run: calls theirs.
        x: the input; gradients to it are compared too.
        roundings: bound on the deviation, in units of x's precision.
        together: whether gradients deviate relative to the largest of them all, since one that is
            a small sum of large terms, such as a bias's, is known to their rounding alone.
    """
    missing = {name for name, _ in ours.named_parameters()} - set(weights)
    assert not missing, f"no weights for {missing}"
    x = x.requires_grad_()
    inputs = {"x": x, **dict(theirs.named_parameters())}
    results = functional_call(ours, dict(weights), (x,)), run(x)
    weight = draw_normal(*results[0].shape, dtype=x.dtype, seed=1)
    gradients = [torch.autograd.grad((y * weight).sum(), list(inputs.values())) for y in results]
    far = {"y": deviation(*results)}
    largest = max(z.abs().max() for z in gradients[1])
    for name, a, b in zip(inputs, *gradients, strict=True):
        far[name] = deviation(a, b) * (b.abs().max() / largest).item() ** together
    tolerance = roundings * torch.finfo(x.dtype).eps / 2
    far = {name: value for name, value in far.items() if not value <= tolerance}
    assert not far, f"deviate by more than {tolerance:.1e}: {far}"
