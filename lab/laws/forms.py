"""The law of forms: a compiled module computes the same as the eager one."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lab.files import describe_error
from lab.laws.comparison import run_trials
from lab.laws.law import Law
from lab.laws.probes import Probes, draw
from lab.laws.trial import Trial
from lab.laws.verdict import Verdict

MOST_CALLS = 1500
"""Calls of torch functions in what is compiled, at most."""


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """The compiled module has the same outputs and gradients as the eager one.

    Other forms have their own laws: "prefill = step" compares the recurrence of `step` with
    forward's chunks, "matrix applies" the matrix applied to values. Compiling takes seconds, so
    this law is not decided where no compiler is named.
    """
    compiler = probes.settings.compiler
    if compiler is None:
        return Verdict(LAW.name, "not decided", "no compiler was chosen")
    # Every length is compiled anew, so only the longest is tried, which has the most chunks; but a
    # loop over tokens is compiled token by token, which limits the length.
    with torch.no_grad():
        few = [n for n in probes.lengths if _count_calls(module, probes.input(n)) <= MOST_CALLS]
    longest = probes.with_lengths([max(few, default=probes.lengths[0])])
    refusals = []
    # Where a backend cannot compile the module, tracing alone may already differ from eager code.
    for backend in dict.fromkeys((compiler, "eager")):
        try:
            found = run_trials(LAW.name, module, longest, partial(_list_trials, backend))
        except Exception as error:
            refusals.append(f"{backend} does not compile it: {describe_error(error)}")
            continue
        if found.verdict != "not decided":
            evidence = "; ".join([f"{backend}: {found.evidence}", *refusals])
            return replace(found, evidence=evidence)
        refusals.append(f"{backend}: {found.evidence}")
    return Verdict(LAW.name, "not decided", "; ".join(refusals))


LAW = Law("forms agree", judge)


def _list_trials(backend: str, module: nn.Module, x: Tensor) -> Iterator[Trial]:
    words = "compiling moves output or gradient {position} of row {row}"
    yield Trial(compare_compiled, {"backend": backend}, words)


class _CallCounter(TorchFunctionMode):
    """Counts calls of torch functions."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _count_calls(module: nn.Module, x: Tensor) -> int:
    with _CallCounter() as calls:
        module(x)
    return calls.count


def compare_compiled(module: nn.Module, x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return how outputs and gradients at the input, side by side, move when a copy is compiled.

    Each is relative to its own largest entry.
    """
    # Slow to import, and only this law needs it.
    from torch._dynamo.utils import counters

    # Compiled code is cached by class. An earlier module of the same class must neither lend its
    # code nor use up the allowed recompilations, after which torch silently runs eager code.
    torch._dynamo.reset()
    compiled = torch.compile(deepcopy(module), backend=backend)
    counters.clear()
    (y, grad), (compiled_y, compiled_grad) = (
        _differentiate(form, x) for form in (module, compiled)
    )
    if not counters["stats"]["unique_graphs"]:
        raise RuntimeError("torch.compile compiled no part of it")
    torch._dynamo.reset()
    tiny = torch.finfo(x.dtype).tiny
    moved = [
        (compiled_y - y).flatten(2) / y.abs().max().clamp(min=tiny),
        (compiled_grad - grad).flatten(2) / grad.abs().max().clamp(min=tiny),
    ]
    return torch.cat(moved, -1), torch.ones_like(x)


def _differentiate(form: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a form's output and the gradient at the input, zero if there is none."""
    inputs = x.clone().requires_grad_()
    y = form(inputs)
    if not y.requires_grad:
        return y, torch.zeros_like(x)
    against = draw(y.shape, seed=0).to(y)
    (grad,) = torch.autograd.grad(y, inputs, against, materialize_grads=True)
    return y.detach(), grad
