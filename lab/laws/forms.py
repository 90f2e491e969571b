"""The law of forms: what torch.compile makes of a module computes the same."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, draw, relative
from lab.laws.verdict import Errors, Verdict, compared


def forms_agree(module: nn.Module, probes: Probes) -> Verdict:
    """Compiled, the module has the same outputs and gradients as eager.

    The other forms have laws of their own: the recurrence of `step` against the chunks of forward,
    `prefill = step`; the quadratic form, a matrix applied to values, `matrix applies`. Compiling
    takes seconds: where no compiler is named, this law is not decided.
    """
    if probes.compiler is None:
        return Verdict("forms agree", "not decided", "no compiler was named")
    # Compiled code is cached by class: a module of the same class, tried before, must neither lend
    # its own nor use up the number of recompilations, past which torch quietly runs eager code.
    torch._dynamo.reset()
    compiled = torch.compile(deepcopy(module), backend=probes.compiler)

    def errors(module: nn.Module, x: Tensor) -> Errors:
        y, grad = _gradient(module, x)
        try:
            compiled_y, compiled_grad = _gradient(compiled, x)
        except (RuntimeError, ValueError) as error:
            yield float("inf"), f"compiled, it raises {type(error).__name__}: {error}"
            return
        yield relative(compiled_y - y, y), "compiled, it gives another output"
        yield relative(compiled_grad - grad, grad), "compiled, it gives another gradient"

    # Each length would be compiled anew, and the longest is the one with chunks to get wrong.
    longest = replace(probes, inputs=probes.inputs[-1:])
    found = compared("forms agree", module, longest, errors)
    torch._dynamo.reset()
    return Verdict(
        found.law, found.verdict, f"{probes.compiler}: {found.evidence}", found.counterexample
    )


def _gradient(module: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and a gradient at the input, zero where there is none."""
    x = x.clone().requires_grad_()
    y = module(x)
    if not y.requires_grad:
        return y, torch.zeros_like(x)
    (grad,) = torch.autograd.grad(y, x, draw(y.shape, seed=0).to(y), allow_unused=True)
    return y.detach(), torch.zeros_like(x) if grad is None else grad
