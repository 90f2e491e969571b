"""Laws of derivatives: the gradient is the derivative, and twice."""

import sys
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
from torch.overrides import TorchFunctionMode

from lab.files import describe_error
from lab.laws.law import LEAST, Law, Timer, Verdict, read_clock
from lab.laws.probes import Probes, draw
from lab.laws.reproduction import write_program
from lab.laws.trace import find_place, list_callers
from lab.seeding import fix_seed

STEPS = (1e-4, 1e-5, 1e-6)
"""Sizes of the steps of central differences."""
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


DIRECTIONS = 2
ALLOWED = 1e-5
"""Relative difference that truncation and rounding explain in fp64."""
SHORT = 33
"""Longest input on which two directions are tried."""
AGREE = 0.1
"""How far central differences of two steps may differ, relative to what they refute."""


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """The gradient along random directions is the central difference of the output along them.

    A weighted sum of the outputs is moved along random directions in the input and in all
    parameters, in fp64, by steps of three sizes; the best of the three counts, because a larger
    step may cross a kink and a smaller one meets rounding. The difference is relative to the
    gradient's norm, which is what a random direction is expected to show.

    torch's own derivatives are right, so the law fails where a custom `autograd.Function` of the
    module is wrong by itself (`judge_functions`), in its backward or its forward mode; where a
    hook changes the gradient; and where the gradient is right on shorter inputs and a part of it is
    missing on a longer one, as of a state that is detached every 64 tokens. Where gradients differ
    by design, by a detached branch or a surrogate gradient, they do so at every length, and the law
    is not decided, nor where calls are not repeatable.
    """
    if probes.dtype != torch.float64 or probes.inside != torch.float64:
        words = "the module does not compute in fp64, so differences are too coarse"
        return Verdict(LAW.name, "not decided", words)
    began, worst, tried = read_clock(), 0.0, []
    timer = Timer(probes.settings.seconds)
    for length in sorted({*probes.lengths, *probes.longer}):
        further = bool(tried) and length > SHORT
        late = not further and read_clock() - began > probes.settings.seconds
        if (further and not timer.allows(length)) or (len(tried) >= LEAST and late):
            break
        x = probes.input(length)
        try:
            if not module(x.clone().requires_grad_()).requires_grad:
                words = "the output has no gradient"
                return Verdict(LAW.name, "not applicable", words)
            directions = range(1 if further else DIRECTIONS)
            error = max(measure_derivative(module, x, seed) for seed in directions)
        except Exception:
            if length in probes.lengths:
                raise
            continue  # e.g. longer than a table of positions, or of an odd length
        if not error <= ALLOWED:
            found = _explain(module, probes, x, error, max(tried, default=0))
            if not further or found.verdict == "fails":
                return found
            break  # e.g. too steep for central differences
        tried.append(length)
        worst = max(worst, error)
    x = probes.input(max(tried))
    functions = sorted(find_functions(module, x), key=lambda function: function.__name__)
    if any(function.jvp is not Function.jvp for function in functions):
        wrong, _ = judge_functions(module, x)
        if wrong:
            return _report(LAW, judge_functions, probes, x, f"length {x.shape[1]}", wrong[0])
    own = ", ".join(function.__name__ for function in functions)
    evidence = f"largest relative error {worst:.2g} ({ALLOWED:g} allowed), lengths "
    evidence += f"{', '.join(map(str, sorted(tried)))}; custom functions: {own or 'none'}"
    return Verdict(LAW.name, "holds", evidence, measured=worst, allowed=ALLOWED, tokens=max(tried))


LAW = Law("gradient is the derivative", judge, conditions="all")


def judge_twice(module: nn.Module, probes: Probes) -> Verdict:
    """A Hessian-vector product by double backward is the central difference of the gradient.

    As in the law above, a custom `autograd.Function` must be wrong by itself for this one to fail:
    most often its backward leaves the graph, so that what it hides counts as constant, without an
    error. Where double backward raises, the module does not claim to have second derivatives.
    """
    if probes.dtype != torch.float64 or probes.inside != torch.float64:
        words = "the module does not compute in fp64, so differences are too coarse"
        return Verdict(TWICE.name, "not decided", words)
    began, worst, tried = read_clock(), 0.0, []
    parameters = [p for p in module.parameters() if p.requires_grad and p.numel()]
    for length in probes.lengths:
        late = length > SHORT or read_clock() - began > probes.settings.seconds
        if tried and late:
            break
        x = probes.input(length).requires_grad_()
        y = module(x.clone())
        if not y.requires_grad:
            return Verdict(TWICE.name, "not applicable", "the output has no gradient")
        y.sum().backward(inputs=[x])
        try:
            error = measure_product(lambda x=x: module(x.clone()), [x, *parameters])
        except Exception as error:
            words = f"no second derivative: {describe_error(error)}"
            return Verdict(TWICE.name, "not applicable", words)
        if not error <= ALLOWED:
            words = (
                f"length {length}: the second derivative differs from differences by {error:.2g}"
            )
            with fix_seed(0, x.device):
                wrong = judge_functions_twice(module, x.detach())
            if wrong:
                return _report(TWICE, judge_functions_twice, probes, x, words, wrong[0])
            words += "; no custom function is wrong, so a part steps, is detached or calls differ"
            return Verdict(TWICE.name, "not decided", words)
        tried.append(length)
        worst = max(worst, error)
    evidence = f"largest relative error {worst:.2g} ({ALLOWED:g} allowed), lengths "
    evidence += ", ".join(map(str, tried))
    return Verdict(TWICE.name, "holds", evidence, measured=worst, allowed=ALLOWED, tokens=tried[-1])


TWICE = Law("twice differentiable", judge_twice, conditions="evaluating")


def measure_derivative(module: nn.Module, x: Tensor, seed: int) -> float:
    """Return how far the gradient along a direction is from a central difference.

    It is relative to the norm of the gradient; x is [b t d].
    """
    return min(compare_slopes(module, x, seed)[0])


def compare_slopes(module: nn.Module, x: Tensor, seed: int) -> tuple[list[float], list[float]]:
    """Return how far the gradient is from each central difference, and each difference.

    Both are relative to the norm of the gradient, and along one direction; x is [b t d].
    """
    parameters = [p for p in module.parameters() if p.requires_grad and p.numel()]
    places = [x.clone().requires_grad_(), *parameters]
    ways = [draw(p.shape, seed=seed + i).to(p) for i, p in enumerate(places)]

    def weigh(inputs: Tensor) -> Tensor:
        y = module(inputs)
        return (y * draw(y.shape, seed=seed).to(y)).sum()

    grads = torch.autograd.grad(weigh(places[0].clone()), places, allow_unused=True)
    along, size = measure_slope(grads, ways)
    errors, slopes, before = [], [], [p.detach().clone() for p in places]
    with torch.no_grad():
        for step in STEPS:
            sums = []
            for sign in (1, -1):
                for p, was, way in zip(places, before, ways, strict=True):
                    p.copy_(was + sign * step * way)
                sums.append(weigh(places[0]).item())
            slope = (sums[0] - sums[1]) / (2 * step)
            # Rounding of a sum of this size, divided by the step, is not an error of the gradient.
            floor = 64 * torch.finfo(x.dtype).eps * max(map(abs, sums)) / step
            scale = max(size, abs(slope), 1e-300)
            errors.append(max(abs(slope - along) - floor, 0.0) / scale)
            slopes.append(slope / scale)
        for p, was in zip(places, before, strict=True):
            p.copy_(was)
    return errors, slopes


class WithoutHooks(TorchFunctionMode):
    """Leaves out the hooks that a module registers on tensors while it runs.

    Attributes:
        places: where they are registered.
    """

    def __init__(self):
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function, unless it registers a hook."""
        if getattr(func, "__name__", "") != "register_hook":
            return func(*args, **(kwargs or {}))
        self.places.append(find_place(list_callers(sys._getframe(1), 0)))
        return None


def measure_without_hooks(module: nn.Module, x: Tensor) -> tuple[float, str]:
    """Return how far the gradient is from the derivative without hooks, and where one is made."""
    with WithoutHooks() as without:
        error = measure_derivative(module, x, seed=0)
    return error, next(iter(without.places), "")


def _explain(module: nn.Module, probes: Probes, x: Tensor, error: float, right: int) -> Verdict:
    """Judge a gradient that is not the derivative.

    A fault is a custom function that is wrong, a hook without which the gradient is right, and a
    gradient that is right up to some length, of at least 3 tokens, and not beyond it.
    """
    words = f"length {x.shape[1]}: the gradient differs from the derivative by {error:.2g}"
    with fix_seed(0, x.device):
        wrong, by_design = judge_functions(module, x)
    if wrong:
        return _report(LAW, judge_functions, probes, x, words, wrong[0])
    hookless, place = measure_without_hooks(module, x)
    if place and hookless <= ALLOWED:
        return _report_gradient(probes, x, f"{words}; a hook changes it, at {place}", error)
    cut = all(_is_steady(*compare_slopes(module, x, seed)) for seed in range(DIRECTIONS))
    if right >= LEAST_RIGHT and cut and not by_design:
        words += f", and by nothing up to length {right}: a part is detached, or left out"
        return _report_gradient(probes, x, words, error)
    why = (
        "; ".join(by_design) or "no custom function is wrong, so a part is detached or calls differ"
    )
    return Verdict(LAW.name, "not decided", f"{words}; {why}")


def _is_steady(errors: list[float], slopes: list[float]) -> bool:
    """Whether central differences agree on an error, and it is more than a kink explains."""
    return min(errors) > KINK and abs(slopes[0] - slopes[-1]) <= AGREE * min(errors)


KINK = 1e-3
"""What a few units at a kink, each of many, may change a gradient by."""
LEAST_RIGHT = 3


def _report_gradient(probes: Probes, x: Tensor, words: str, error: float) -> Verdict:
    rows, length = x.shape[:2]
    body = f"""
        {probes.print_input(rows, length)}
        error = max(measure_derivative(module, x, seed) for seed in range({DIRECTIONS}))
        print("the gradient differs from the central difference by", error)
        sys.exit(not error <= {ALLOWED})
    """
    title = f"{LAW.name}: {words}"
    snippet = write_program(probes.origin, (draw, measure_derivative), body, title)
    evidence = f"relative error {error:.2g} ({ALLOWED:g} allowed) in float64"
    where = {"length": length, "rows": rows}
    return Verdict(LAW.name, "fails", evidence, words, error, ALLOWED, snippet, where)


def _report(
    law: Law,
    judge_each: Callable[[nn.Module, Tensor], Any],
    probes: Probes,
    x: Tensor,
    words: str,
    wrong: BackwardError,
) -> Verdict:
    words = f"{words}: {wrong.describe()}"
    rows, length = x.shape[:2]
    body = f"""
        {probes.print_input(rows, length)}
        found = {judge_each.__name__}(module, x)
        wrong = found[0] if isinstance(found, tuple) else found
        print("custom functions with a wrong derivative:", *(one.describe() for one in wrong))
        sys.exit(bool(wrong))
    """
    title = f"{law.name}: {words}"
    snippet = write_program(probes.origin, (draw, judge_each), body, title)
    evidence = f"relative error {wrong.error:.2g} ({ALLOWED:g} allowed) in float64"
    where = {"length": length, "rows": rows}
    return Verdict(law.name, "fails", evidence, words, wrong.error, ALLOWED, snippet, where)
