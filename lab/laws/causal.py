"""The law of causality: no output depends on a later input, forward or by gradient."""

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, draw, relative
from lab.laws.verdict import Errors, Verdict, compared


def causal(module: nn.Module, probes: Probes) -> Verdict:
    """No output depends on a later input, forward or by gradient."""
    return compared("causal", module, probes, _errors)


def _errors(module: nn.Module, x: Tensor) -> Errors:
    with torch.no_grad():
        y = module(x)
    for s in _positions(x.shape[1]):
        with torch.no_grad():
            # A small change follows a smooth leak; a larger one flips a hidden choice.
            for scale in (1, 8):
                changed = x.clone()
                changed[:, s] = scale * draw(x[:, s].shape, seed=s + 1).to(x)
                moved = module(changed)[:, :s] - y[:, :s]
                yield relative(moved, y), f"changing position {s} moves an earlier output"
            moved = module(x[:, : s + 1]) - y[:, : s + 1]
        yield relative(moved, y), f"cutting after position {s} moves an earlier output"
        inputs = x.clone().requires_grad_()
        output = module(inputs)[:, s]
        if output.requires_grad:
            (grad,) = torch.autograd.grad(output, inputs, draw(output.shape, seed=s).to(output))
            leak = relative(grad[:, s + 1 :], grad)
            yield leak, f"output {s} has a gradient at a later position"


def _positions(length: int) -> list[int]:
    """Return all positions of a short sequence, 16 spread over a long one."""
    if length <= 16:
        return list(range(length))
    return sorted({round(i * (length - 1) / 15) for i in range(16)})
