"""Under what a module is tried: its weights can hide a fault, and so can its mode."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lab.laws.copying import copied

Weights = Literal["as built", "moved", "larger"]


@dataclass(frozen=True)
class Condition:
    """What a module is brought to before laws try it.

    Attributes:
        seed: of its weights, where it can be built anew, and of the probes.
        weights: "as built"; "moved", with noise on what was constant; "larger", matrices times 3.
        training: or evaluating.
    """

    seed: int
    weights: Weights
    training: bool

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluating"
        return f"seed {self.seed}, weights {self.weights}, {mode}"


CONDITIONS = (
    Condition(0, "as built", False),
    Condition(1, "moved", False),
    Condition(2, "larger", False),
    Condition(3, "moved", True),
)
"""The first is the one for laws of numbers, and for those that look at several seeds themselves."""


def brought(module: nn.Module, weights: Weights, seed: int, training: bool) -> nn.Module:
    """Return a copy of the module under a condition."""
    if weights == "moved":
        module = moved(module, seed)
    elif weights == "larger":
        module = larger(module)
    else:
        module = copied(module)
    return module.train(training)


@torch.no_grad()
def moved(module: nn.Module, seed: int) -> nn.Module:
    """Return a copy with noise on the trainable entries that nobody drew: zeros, and constants.

    A projection, a gate or a key table that begins at zero hides what stands behind it. Zeros, of
    any parameter, become normal numbers of deviation 0.5; a parameter of equal entries is
    multiplied by exp(0.3 times one), which keeps its sign.
    """
    module = copied(module)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.requires_grad and parameter.is_floating_point():
            noise = noise.to(parameter)
            drawn = parameter * (0.3 * noise).exp() if constant(parameter) else parameter
            parameter.copy_(torch.where(parameter == 0, noise / 2, drawn))
    return module


@torch.no_grad()
def larger(module: nn.Module) -> nn.Module:
    """Return a copy whose trainable parameters of two axes and more are three times as large."""
    module = copied(module)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.mul_(3)
    return module


def constant(parameter: Tensor) -> bool:
    """Whether all entries are the same number."""
    return parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())


class Seeded(nn.Module):
    """A module that draws random numbers, dropout's say, the same in every call."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output from the same random state."""
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(0)
            return self.module(x)
