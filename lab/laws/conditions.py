"""Bringing a module to a condition: other weights, another mode, fixed random numbers."""

import torch
from torch import Tensor, nn

from lab.certify_settings import Weights
from lab.laws.copying import copy_module
from lab.seeding import fix_seed


def apply_condition(module: nn.Module, weights: Weights, seed: int, training: bool) -> nn.Module:
    """Return a copy of the module with the weights and the mode of a condition."""
    if weights == "moved":
        module = move_constants(module, seed)
    elif weights == "larger":
        module = enlarge(module)
    else:
        module = copy_module(module)
    return module.train(training)


@torch.no_grad()
def move_constants(module: nn.Module, seed: int) -> nn.Module:
    """Return a copy with noise on trainable entries that were not drawn: zeros and constants.

    A projection, a gate or a key table that is initialised to zero hides faults behind it. Zeros,
    in any parameter, become normal numbers with standard deviation 0.5; a parameter whose entries
    are all equal is multiplied by exp(0.3 · normal), which keeps its sign.
    """
    module = copy_module(module)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.requires_grad and parameter.is_floating_point():
            noise = noise.to(parameter)
            varied = parameter * (0.3 * noise).exp() if is_constant(parameter) else parameter
            parameter.copy_(torch.where(parameter == 0, noise / 2, varied))
    return module


@torch.no_grad()
def enlarge(module: nn.Module) -> nn.Module:
    """Return a copy whose trainable parameters of two or more axes are three times as large."""
    module = copy_module(module)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.mul_(3)
    return module


def is_constant(parameter: Tensor) -> bool:
    """Whether all entries are the same number."""
    return parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())


class Seeded(nn.Module):
    """A wrapper that makes a module draw the same random numbers, e.g. for dropout, every call."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output from the same random state."""
        with fix_seed(0, x.device):
            return self.module(x)
