"""The law of forms: what torch.compile makes of a module computes the same."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lab.laws.probes import Probes, draw
from lab.laws.verdict import Trial, Verdict, compared

MOST_CALLS = 1500  # of torch, in what is compiled


def forms_agree(module: nn.Module, probes: Probes) -> Verdict:
    """Compiled, the module has the same outputs and gradients as eager.

    The other forms have laws of their own: the recurrence of `step` against the chunks of forward,
    `prefill = step`; the quadratic form, a matrix applied to values, `matrix applies`. Compiling
    takes seconds: where no compiler is named, this law is not decided.
    """
    law = "forms agree"
    if probes.compiler is None:
        return Verdict(law, "not decided", "no compiler was named")
    # Each length would be compiled anew, and the longest is the one with chunks to get wrong; but
    # a loop over tokens is compiled token by token.
    with torch.no_grad():
        few = [n for n in probes.lengths if _calls(module, probes.input(n)) <= MOST_CALLS]
    longest = replace(probes, lengths=[max(few, default=probes.lengths[0])])
    refusals = []
    # What a backend cannot compile, the tracing alone may tell apart from eager code.
    for backend in dict.fromkeys((probes.compiler, "eager")):
        try:
            found = compared(law, module, longest, partial(_trials, backend))
        except (RuntimeError, ValueError) as error:
            words = f"{backend} does not compile it: {type(error).__name__}: {error}"
            refusals.append(words.splitlines()[0])
            continue
        if found.verdict != "not decided":
            evidence = "; ".join([f"{backend}: {found.evidence}", *refusals])
            return replace(found, evidence=evidence)
        refusals.append(f"{backend}: {found.evidence}")
    return Verdict(law, "not decided", "; ".join(refusals))


def _trials(backend: str, module: nn.Module, x: Tensor) -> Iterator[Trial]:
    words = "compiled, it gives another output or gradient {position} of row {row}"
    yield Trial(moved_by_compiling, {"backend": backend}, words)


class _Calls(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _calls(module: nn.Module, x: Tensor) -> int:
    with _Calls() as calls:
        module(x)
    return calls.count


def moved_by_compiling(module: nn.Module, x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return how outputs, and after them gradients at the input, move when a copy is compiled.

    Each is given relative to its own largest.
    """
    # Slow to import, and only this law needs it.
    from torch._dynamo.utils import counters

    # Compiled code is cached by class: a module of the same class, tried before, must neither lend
    # its own nor use up the number of recompilations, past which torch quietly runs eager code.
    torch._dynamo.reset()
    compiled = torch.compile(deepcopy(module), backend=backend)
    counters.clear()
    (y, grad), (compiled_y, compiled_grad) = (_formed(form, x) for form in (module, compiled))
    if not counters["stats"]["unique_graphs"]:
        raise RuntimeError("nothing of it was compiled")
    torch._dynamo.reset()
    tiny = torch.finfo(x.dtype).tiny
    moved = [
        (compiled_y - y).flatten(2) / y.abs().max().clamp(min=tiny),
        (compiled_grad - grad).flatten(2) / grad.abs().max().clamp(min=tiny),
    ]
    return torch.cat(moved, -1), torch.ones_like(x)


def _formed(form: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a form's output and a gradient at the input, zero where there is none."""
    inputs = x.clone().requires_grad_()
    y = form(inputs)
    if not y.requires_grad:
        return y, torch.zeros_like(x)
    against = draw(y.shape, seed=0).to(y)
    (grad,) = torch.autograd.grad(y, inputs, against, materialize_grads=True)
    return y.detach(), grad
