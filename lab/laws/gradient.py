"""The law of gradients: every parameter learns."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, described, draw
from lab.laws.verdict import Verdict

Reach = Literal["alive", "zero", "none"]


def gradient_reach(module: nn.Module, probes: Probes) -> Verdict:
    """Every parameter gets a gradient."""
    found = reach(module, probes.inputs)
    if not found:
        return Verdict("gradient reach", "not applicable", "the module has no trainable parameter")
    dead = [f"{name}: {how}" for name, how in found.items() if how != "alive"]
    evidence = f"{len(found) - len(dead)} of {len(found)} parameters alive, {described(probes)}"
    if dead:
        return Verdict("gradient reach", "fails", evidence, "; ".join(dead))
    return Verdict("gradient reach", "holds", evidence)


def reach(module: nn.Module, inputs: Sequence[Tensor], seeds: int = 3) -> dict[str, Reach]:
    """Return, for each trainable parameter, whether any probe gives it a gradient.

    "none": no path leads from the output to it; "zero": a path does, and carries nothing but
    rounding (less than 64 units in the last place of the largest gradient of all); "alive".
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    largest: dict[str, float | None] = dict.fromkeys(parameters)
    for x in inputs if parameters else ():
        for seed in range(seeds):
            y = module(draw(x.shape, seed).to(x))
            if not y.requires_grad:
                continue
            against = draw(y.shape, seed + seeds).to(y)
            grads = torch.autograd.grad(y, list(parameters.values()), against, allow_unused=True)
            for name, grad in zip(parameters, grads, strict=True):
                if grad is not None:
                    largest[name] = max(largest[name] or 0.0, grad.abs().max().item())
    sizes = [size for size in largest.values() if size is not None]
    threshold = 64 * torch.finfo(inputs[0].dtype).eps * max(sizes, default=0.0)
    return {
        name: "none" if size is None else "alive" if size > threshold else "zero"
        for name, size in largest.items()
    }
