"""What every causal model must obey, as functions that return a verdict.

Each law runs a module from [b t d] to [b t d] on probes and compares outputs that must agree.
"Agree" is measured against the module's own noise floor, in fp64 where the module can run so:
a module whose output moves by n when its input is rounded cannot be held to less than n.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

Outcome = Literal["holds", "fails", "not applicable", "not decided"]
Reach = Literal["alive", "zero", "none"]


@dataclass(frozen=True)
class Verdict:
    """A law's outcome on a module, with the numbers behind it."""

    law: str
    verdict: Outcome
    evidence: str
    counterexample: str | None = None


@runtime_checkable
class MatrixMixer(Protocol):
    """A sequence mixer that can show itself as one matrix a head."""

    def matrix(self, x: Tensor, /) -> Tensor:
        """Return the matrix [b h t s]."""
        ...

    def values(self, x: Tensor, /) -> Tensor:
        """Return what it mixes [b h s p]."""
        ...

    def project(self, x: Tensor, z: Tensor, /) -> Tensor:
        """Return the output [b t d] from the mixed values z [b h t p]."""
        ...


def certify(
    module: nn.Module,
    d_model: int,
    lengths: Sequence[int] = (1, 2, 5, 16),
    batch: int = 3,
    seed: int = 0,
) -> list[Verdict]:
    """Try every law on a module, in the mode (train or eval) and on the device it is in.

    Args:
        module: from [b t d] to [b t d]; a copy is tried, so it comes out as it went in.
        d_model: width d.
        lengths: sequence lengths to try; let them span a chunked module's chunks.
        batch: rows b of a probe.
        seed: of the probes.

    Raises:
        ValueError: for no length, or lengths, d_model or batch below one.
    """
    if not lengths or min(*lengths, d_model, batch) < 1:
        raise ValueError(f"{lengths=}, {d_model=} and {batch=} must be at least 1")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    probes = [_draw((batch, length, d_model), seed).to(device) for length in sorted(lengths)]
    module, probes = in_double(module, probes)
    laws = (deterministic, causal, batch_invariant, matrix_applies, gradient_reach)
    return [law(module, probes) for law in laws]


def in_double(module: nn.Module, probes: list[Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """Return a copy of the module in fp64 with its probes, or in its own precision.

    A module may refuse fp64, by a cast to fp32 inside that meets an fp64 weight, say.
    """
    double = deepcopy(module).double()
    try:
        double(probes[0])
    except RuntimeError:
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        return deepcopy(module), [x.to(dtype) for x in probes]
    return double, probes


def noise_floor(module: Callable[[Tensor], Tensor], x: Float[Tensor, "b t d"]) -> float:
    """Return how far rounding moves the module's output, relative to its largest entry.

    Moving x to and fro by h = √eps tells two things: how steep the module is, so how far one
    rounding of x moves it, eps·|y₊ - y|/h, and how far it is from a straight line, |y₊ + y₋ - 2y|,
    which is rounding once curvature, h² = eps, is no larger. The second sees modules that
    compute in a lower precision than they return, and those that are not deterministic.
    """
    with torch.no_grad():
        y = module(x)
        eps = torch.finfo(torch.promote_types(x.dtype, y.dtype)).eps
        step = x * eps**0.5 * _draw(x.shape, seed=1).sign().to(x)
        ahead, behind = module(x + step), module(x - step)
    steepness = _relative(ahead - y, y) * eps**0.5
    return max(eps, steepness, _relative(ahead + behind - 2 * y, y))


def deterministic(module: nn.Module, probes: list[Tensor]) -> Verdict:
    """The same input gives the same bits."""
    with torch.no_grad():
        for x in probes:
            first, second = module(x), module(x)
            if not torch.equal(first, second):
                evidence = f"relative difference {_relative(second - first, first):.2g}"
                counterexample = f"length {x.shape[1]}: a second call gives another output"
                return Verdict("deterministic", "fails", evidence, counterexample)
    return Verdict("deterministic", "holds", f"two calls, {_described(probes)}: equal bits")


def causal(module: nn.Module, probes: list[Tensor]) -> Verdict:
    """No output depends on a later input, forward or by gradient."""
    return _compared("causal", module, probes, _causal_errors)


def batch_invariant(module: nn.Module, probes: list[Tensor]) -> Verdict:
    """A row gives the same output alone, beside other rows, and in another order."""
    return _compared("batch-invariant", module, probes, _batch_errors)


def matrix_applies(module: nn.Module, probes: list[Tensor]) -> Verdict:
    """forward(x) = project(x, matrix(x) @ values(x))."""
    if not isinstance(module, MatrixMixer):
        missing = "the module has no matrix, values and project"
        return Verdict("matrix applies", "not applicable", missing)
    return _compared("matrix applies", module, probes, _matrix_errors)


def gradient_reach(module: nn.Module, probes: list[Tensor]) -> Verdict:
    """Every parameter gets a gradient."""
    found = reach(module, probes)
    if not found:
        return Verdict("gradient reach", "not applicable", "the module has no trainable parameter")
    dead = [f"{name}: {how}" for name, how in found.items() if how != "alive"]
    evidence = f"{len(found) - len(dead)} of {len(found)} parameters alive, {_described(probes)}"
    if dead:
        return Verdict("gradient reach", "fails", evidence, "; ".join(dead))
    return Verdict("gradient reach", "holds", evidence)


def reach(module: nn.Module, probes: list[Tensor], seeds: int = 3) -> dict[str, Reach]:
    """Return, for each trainable parameter, whether any probe gives it a gradient.

    "none": no path leads from the output to it; "zero": a path does, and carries nothing but
    rounding (less than 64 units in the last place of the largest gradient of all); "alive".
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    largest: dict[str, float | None] = dict.fromkeys(parameters)
    for probe in probes:
        for seed in range(seeds):
            y = module(_draw(probe.shape, seed).to(probe))
            if not y.requires_grad:
                continue
            against = _draw(y.shape, seed + seeds).to(y)
            grads = torch.autograd.grad(y, list(parameters.values()), against, allow_unused=True)
            for name, grad in zip(parameters, grads, strict=True):
                if grad is not None:
                    largest[name] = max(largest[name] or 0.0, grad.abs().max().item())
    sizes = [size for size in largest.values() if size is not None]
    threshold = 64 * torch.finfo(probes[0].dtype).eps * max(sizes, default=0.0)
    return {
        name: "none" if size is None else "alive" if size > threshold else "zero"
        for name, size in largest.items()
    }


Errors = Iterator[tuple[float, str]]
"""Relative errors that a law says are zero, each with the words for it as a counterexample."""


def _compared(
    law: str, module: nn.Module, probes: list[Tensor], errors: Callable[[nn.Module, Tensor], Errors]
) -> Verdict:
    """Hold a law's errors against the noise floor, shortest probe first."""
    worst, allowed = 0.0, 0.0
    for x in probes:
        bound = 64 * noise_floor(module, x)
        # Past this, noise would hide a leak, a dependence on the order of rounding, say.
        if not bound < 1e-2:
            noise = f"length {x.shape[1]}: rounding the input moves the output by {bound / 64:.2g}"
            return Verdict(law, "not decided", noise)
        for error, words in errors(module, x):
            if not error <= bound:
                evidence = f"relative error {error:.2g} against {bound:.2g} allowed"
                return Verdict(law, "fails", evidence, f"length {x.shape[1]}: {words}")
            worst, allowed = max(worst, error), max(allowed, bound)
    evidence = f"worst relative error {worst:.2g} of {allowed:.2g} allowed, {_described(probes)}"
    return Verdict(law, "holds", evidence)


def _causal_errors(module: nn.Module, x: Tensor) -> Errors:
    with torch.no_grad():
        y = module(x)
    for s in _positions(x.shape[1]):
        with torch.no_grad():
            # A small change follows a smooth leak; a larger one flips a hidden choice.
            for scale in (1, 8):
                changed = x.clone()
                changed[:, s] = scale * _draw(x[:, s].shape, seed=s + 1).to(x)
                moved = module(changed)[:, :s] - y[:, :s]
                yield _relative(moved, y), f"changing position {s} moves an earlier output"
            moved = module(x[:, : s + 1]) - y[:, : s + 1]
        yield _relative(moved, y), f"cutting after position {s} moves an earlier output"
        inputs = x.clone().requires_grad_()
        output = module(inputs)[:, s]
        if output.requires_grad:
            (grad,) = torch.autograd.grad(output, inputs, _draw(output.shape, seed=s).to(output))
            leak = _relative(grad[:, s + 1 :], grad)
            yield leak, f"output {s} has a gradient at a later position"


def _batch_errors(module: nn.Module, x: Tensor) -> Errors:
    with torch.no_grad():
        y = module(x)
        reversed_y = module(x.flip(0)).flip(0)
        yield _relative(reversed_y - y, y), "reversing the batch moves a row's output"
        for row in range(x.shape[0]):
            one = slice(row, row + 1)
            alone = module(x[one])
            yield _relative(alone - y[one], y), f"row {row} alone gives another output"
            others = 8 * _draw(x.shape, seed=row + 1).to(x)
            others[one] = x[one]
            beside = module(others)[one]
            yield _relative(beside - y[one], y), f"row {row} beside others gives another output"


def _matrix_errors(module: nn.Module, x: Tensor) -> Errors:
    assert isinstance(module, MatrixMixer)
    with torch.no_grad():
        y = module(x)
        applied = module.project(x, module.matrix(x) @ module.values(x))
        yield _relative(applied - y, y), "forward(x) is not project(x, matrix(x) @ values(x))"


def _positions(length: int) -> list[int]:
    """Return all positions of a short sequence, 16 spread over a long one."""
    if length <= 16:
        return list(range(length))
    return sorted({round(i * (length - 1) / 15) for i in range(16)})


def _relative(difference: Tensor, reference: Tensor) -> float:
    """Return the largest entry of a difference over that of a reference; NaN stays NaN."""
    if not difference.numel():
        return 0.0
    size, scale = difference.abs().max().item(), reference.abs().max().item()
    if size == 0:
        return 0.0
    return size / scale if scale else float("inf")


def _draw(shape: Sequence[int], seed: int) -> Tensor:
    """Return normal numbers in fp64 that depend on shape and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _described(probes: list[Tensor]) -> str:
    lengths = ", ".join(str(x.shape[1]) for x in probes)
    return f"lengths {lengths} in {str(probes[0].dtype).removeprefix('torch.')}"
