"""What a law says of a module, and how it compares outputs that must agree."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from lab.laws.probes import Probes, described, noise_floor

Outcome = Literal["holds", "fails", "not applicable", "not decided"]


@dataclass(frozen=True)
class Verdict:
    """A law's outcome on a module, with the numbers behind it."""

    law: str
    verdict: Outcome
    evidence: str
    counterexample: str | None = None


Law = Callable[[nn.Module, Probes], Verdict]

Errors = Iterator[tuple[float, str]]
"""Relative errors that a law says are zero, each with the words for it as a counterexample."""


def compared(
    law: str,
    module: nn.Module,
    probes: Probes,
    errors: Callable[[nn.Module, Tensor], Errors],
    roundings: int = 64,
) -> Verdict:
    """Hold a law's errors against the noise floor, shortest probe first.

    Args:
        law: its name.
        module: as it is.
        probes: of which only the inputs are used.
        errors: what the law finds on an input.
        roundings: how many times the noise floor an error may be.
    """
    worst, allowed = 0.0, 0.0
    for x in probes.inputs:
        bound = roundings * noise_floor(module, x)
        # Past this, noise would hide a leak, a dependence on the order of rounding, say.
        if not bound < 1e-2:
            moved = bound / roundings
            noise = f"length {x.shape[1]}: rounding the input moves the output by {moved:.2g}"
            return Verdict(law, "not decided", noise)
        for error, words in errors(module, x):
            if not error <= bound:
                evidence = f"relative error {error:.2g} against {bound:.2g} allowed"
                return Verdict(law, "fails", evidence, f"length {x.shape[1]}: {words}")
            worst, allowed = max(worst, error), max(allowed, bound)
    evidence = f"worst relative error {worst:.2g} of {allowed:.2g} allowed, {described(probes)}"
    return Verdict(law, "holds", evidence)
