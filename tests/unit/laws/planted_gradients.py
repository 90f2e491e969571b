"""A module with a planted function and parameters, and the law of gradients to judge it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws import LAWS, CertifySettings, Probes, Verdict


def judge(module: nn.Module, lengths: tuple[int, ...] = (1, 5)) -> Verdict:
    probes = Probes(CertifySettings(8, lengths, batch=2))
    return LAWS["gradient reach"].judge(module.double(), probes)


class Planted(nn.Module):
    """A function of itself and of a map's output, with parameters of its own."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parameters: Tensor):
        super().__init__()
        self.function = function
        self.map = nn.Linear(8, 8)
        for name, start in parameters.items():
            self.register_parameter(name, nn.Parameter(start.clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.map(x))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def rank(m: Any, h: Tensor) -> Tensor:
    return h + m.table[(0 * h[..., :6]).argsort(dim=-1, descending=True, stable=True)[..., 0]]
