"""The laws of derivatives: the backward pass returns the derivative, and so it does twice."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lab.files import describe_error
from lab.laws.backward import (
    BackwardError,
    find_functions,
    judge_functions,
    judge_functions_twice,
    measure_product,
    measure_slope,
)
from lab.laws.law import Law
from lab.laws.probes import Probes, draw
from lab.laws.reproduction import write_program
from lab.laws.timing import LEAST, Timer, read_clock
from lab.laws.verdict import Verdict
from lab.seeding import fix_seed

STEPS = (1e-4, 1e-5, 1e-6)
"""Sizes of the steps of central differences."""
DIRECTIONS = 2
ALLOWED = 1e-5
"""Relative difference that truncation and rounding explain in fp64."""
SHORT = 33
"""Longest input on which modules without custom functions are tried."""


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """The gradient along random directions is the central difference of the output along them.

    A weighted sum of the outputs is moved along random directions in the input and in all
    parameters, in fp64, by steps of three sizes; the best of the three counts, because a larger
    step may cross a kink and a smaller one meets rounding. The difference is relative to the
    gradient's norm, which is what a random direction is expected to show.

    torch's own derivatives are right, so the law fails only where a custom `autograd.Function` of
    the module is wrong by itself (`lab.laws.backward`), in its backward or its forward mode. Such a
    function may work in chunks, so while there is time it is tried on longer inputs too. Where
    gradients differ by design, by a detached branch or a surrogate gradient, it is not decided, nor
    where calls are not repeatable.
    """
    if probes.dtype != torch.float64 or probes.inside != torch.float64:
        words = "the module does not compute in fp64, so differences are too coarse"
        return Verdict(LAW.name, "not decided", words)
    began, worst, tried = read_clock(), 0.0, []
    timer = Timer(probes.settings.seconds)
    for length in (*probes.lengths, *probes.longer):
        further = bool(tried) and length > SHORT
        late = not further and read_clock() - began > probes.settings.seconds
        if (further and not timer.allows(length)) or (len(tried) >= LEAST and late):
            break
        x = probes.input(length)
        try:
            if not module(x.clone().requires_grad_()).requires_grad:
                words = "the output has no gradient"
                return Verdict(LAW.name, "not applicable", words)
            if further and not find_functions(module, x):
                continue
            error = max(measure_derivative(module, x, seed) for seed in range(DIRECTIONS))
        except Exception:
            if length in probes.lengths:
                raise
            continue  # e.g. longer than a table of positions, or of an odd length
        if not error <= ALLOWED:
            found = _explain(module, probes, x, error)
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


LAW = Law("gradient is the derivative", judge, conditions="evaluating")


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
    parameters = [p for p in module.parameters() if p.requires_grad and p.numel()]
    places = [x.clone().requires_grad_(), *parameters]
    ways = [draw(p.shape, seed=seed + i).to(p) for i, p in enumerate(places)]

    def weigh(inputs: Tensor) -> Tensor:
        y = module(inputs)
        return (y * draw(y.shape, seed=seed).to(y)).sum()

    grads = torch.autograd.grad(weigh(places[0].clone()), places, allow_unused=True)
    along, size = measure_slope(grads, ways)
    errors, before = [], [p.detach().clone() for p in places]
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
            errors.append(max(abs(slope - along) - floor, 0.0) / max(size, abs(slope), 1e-300))
        for p, was in zip(places, before, strict=True):
            p.copy_(was)
    return min(errors)


def _explain(module: nn.Module, probes: Probes, x: Tensor, error: float) -> Verdict:
    """Judge a gradient that is not the derivative: a fault if a custom function is wrong."""
    words = f"length {x.shape[1]}: the gradient differs from the derivative by {error:.2g}"
    with fix_seed(0, x.device):
        wrong, by_design = judge_functions(module, x)
    if wrong:
        return _report(LAW, judge_functions, probes, x, words, wrong[0])
    why = (
        "; ".join(by_design) or "no custom function is wrong, so a part is detached or calls differ"
    )
    return Verdict(LAW.name, "not decided", f"{words}; {why}")


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
