"""Custom autograd functions of a module, each compared with central differences by itself."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import BackwardCFunction

from lab.laws.probes import draw

STEPS = (1e-4, 1e-5, 1e-6)
WRONG = 1e-5
"""Relative difference above which a backward pass is wrong."""
AGAIN = "backward, differentiated again,"
FLAT = 1e-7
"""Slope, relative to the gradient, below which a function is constant where it is tried."""


@dataclass(frozen=True)
class BackwardError:
    """A custom function whose derivative is wrong.

    Attributes:
        function: its class.
        error: relative difference from a central difference.
        mode: "backward", "jvp", or `AGAIN`.
    """

    function: type[Function]
    error: float
    mode: str

    def describe(self) -> str:
        """Describe the fault in words."""
        return f"{self.function.__name__}.{self.mode} is wrong by {self.error:.2g}"


def find_functions(module: nn.Module, x: Tensor) -> set[type[Function]]:
    """Return the custom functions whose backward the module's gradient calls."""
    found, seen = set(), set()
    waiting: list[Any] = [module(x.clone().requires_grad_()).grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found.add(vars(type(node))["_forward_cls"])
        waiting += [before for before, _ in node.next_functions]
    return found


def judge_functions(module: nn.Module, x: Tensor) -> tuple[list[BackwardError], list[str]]:
    """Return the custom functions whose derivative is wrong, and those that differ by design.

    By design differ: a function that returns its input, such as a reversal or a scale of gradients,
    and one that is constant where it is tried, such as rounding with a surrogate gradient.
    """
    wrong, by_design = [], []
    for function in sorted(find_functions(module, x), key=lambda f: f.__name__):
        with _record_call(function) as calls:
            module(x.clone().requires_grad_())
        for mode in ("backward", "jvp"):
            if not calls or (mode == "jvp" and function.jvp is Function.jvp):
                continue
            try:
                error, purpose = _compare(function, calls[0], mode)
            except Exception:
                by_design.append(f"{function.__name__} cannot be called by itself")
                break
            if error <= WRONG:
                continue
            if purpose:
                by_design.append(f"{function.__name__} {purpose}")
                break
            wrong.append(BackwardError(function, error, mode))
    return wrong, by_design


def judge_functions_twice(module: nn.Module, x: Tensor) -> list[BackwardError]:
    """Return the custom functions whose gradient is right, and its own derivative wrong.

    One whose second derivative raises is not among them.
    """
    wrong = []
    for function in sorted(find_functions(module, x), key=lambda f: f.__name__):
        with _record_call(function) as calls:
            module(x.clone().requires_grad_())
        try:
            call, places = _isolate(function, calls[0])
            error = measure_product(partial(call, places), places)
            if _compare(function, calls[0], "backward")[0] <= WRONG < error:
                wrong.append(BackwardError(function, error, AGAIN))
        except Exception:
            continue
    return wrong


def measure_product(compute: Callable[[], Tensor], places: Sequence[Tensor]) -> float:
    """Return how far a Hessian-vector product is from central differences of the gradient.

    The error is relative to the product's norm. The loss is a weighted sum of squares of what is
    computed, so that it bends where the computation does not.

    Args:
        compute: returns a tensor that depends on the places.
        places: leaves that need gradients; they are moved, and put back.
    """
    ways = [draw(p.shape, seed=i).to(p) for i, p in enumerate(places)]

    def differentiate(again: bool) -> list[Tensor]:
        y = compute()
        loss = (y.square() * draw(y.shape, seed=0).to(y)).sum()
        grads = torch.autograd.grad(loss, places, create_graph=again, allow_unused=True)
        if again:
            # A gradient without a graph claims to be constant.
            pairs = [(g, w) for g, w in zip(grads, ways, strict=True) if g is not None]
            along = sum((g * w).sum() for g, w in pairs) + 0 * loss
            grads = torch.autograd.grad(along, places, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, places, strict=True)]

    product = _flatten(differentiate(again=True))
    errors, before = [], [p.detach().clone() for p in places]
    for step in STEPS:
        gradients = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, was, way in zip(places, before, ways, strict=True):
                    p.copy_(was + sign * step * way)
            gradients.append(_flatten(differentiate(again=False)))
        difference = (gradients[0] - gradients[1]) / (2 * step)
        # Rounding of a gradient of this size, divided by the step, is no error of the product.
        floor = 64 * torch.finfo(product.dtype).eps * gradients[0].norm().item() / step
        size = max(product.norm().item(), difference.norm().item(), 1e-300)
        errors.append(max((product - difference).norm().item() - floor, 0.0) / size)
    with torch.no_grad():
        for p, was in zip(places, before, strict=True):
            p.copy_(was)
    return min(errors)


def measure_slope(grads: Sequence[Tensor | None], ways: Sequence[Tensor]) -> tuple[float, float]:
    """Return the slope along a direction that gradients give, and their norm; None is zero."""
    pairs = [(g, way) for g, way in zip(grads, ways, strict=True) if g is not None]
    slope = sum((g * way).sum().item() for g, way in pairs)
    return slope, sum(g.square().sum().item() for g, _ in pairs) ** 0.5


@contextmanager
def _record_call(function: type[Function]) -> Iterator[list[tuple[Any, ...]]]:
    """Collect the arguments of each call of a function within a `with` block."""
    calls: list[tuple[Any, ...]] = []
    original = function.forward
    with_context = function.setup_context is Function.setup_context

    def forward(*args: Any) -> Any:
        given = args[1:] if with_context else args
        calls.append(tuple(_copy(a) if isinstance(a, Tensor) else a for a in given))
        return original(*args)

    with patch.object(function, "forward", staticmethod(forward)):
        yield calls


def _compare(function: type[Function], args: tuple[Any, ...], mode: str) -> tuple[float, str]:
    """Return the relative error of a function's derivative, and what makes it one by design."""
    call, places = _isolate(function, args)
    ways = [draw(p.shape, seed=i).to(p) for i, p in enumerate(places)]
    y = call(places)
    weights = draw(y.shape, seed=0).to(y)
    grads = torch.autograd.grad((y * weights).sum(), places, allow_unused=True)
    along, size = measure_slope(grads, ways)
    if mode == "jvp":
        # torch's forward mode itself uses what torch deprecates.
        with warnings.catch_warnings(action="ignore"), forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(p.detach(), way) for p, way in zip(places, ways, strict=True)
            ]
            tangent = forward_ad.unpack_dual(call(duals)).tangent
        along = 0.0 if tangent is None else (tangent * weights).sum().item()
    slopes = []
    with torch.no_grad():
        for step in STEPS:
            ahead, behind = (
                (call([p + sign * step * way for p, way in zip(places, ways, strict=True)]))
                for sign in (1, -1)
            )
            slopes.append(((ahead - behind) * weights).sum().item() / (2 * step))
    scale = max(size, 1e-300)
    error = min(abs(slope - along) / max(scale, abs(slope)) for slope in slopes)
    if any(p.numel() == y.numel() and torch.equal(p.flatten(), y) for p in places):
        return error, "returns its input and changes its gradient"
    constant = min(map(abs, slopes)) <= FLAT * scale
    return error, "is constant here and has a surrogate gradient" if constant else ""


def _isolate(
    function: type[Function], args: tuple[Any, ...]
) -> tuple[Callable[[list[Tensor]], Tensor], list[Tensor]]:
    """Return a function of its differentiable arguments alone, and copies of these."""
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]

    def call(given: list[Tensor]) -> Tensor:
        filled = list(args)
        for i, tensor in zip(at, given, strict=True):
            filled[i] = tensor
        outputs = function.apply(*filled)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.cat([y.flatten() for y in outputs if _is_float(y)])

    return call, [args[i].detach().clone().requires_grad_() for i in at]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([z.flatten() for z in tensors])


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_float(y: Any) -> bool:
    return isinstance(y, Tensor) and y.is_floating_point()
