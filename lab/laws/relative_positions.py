"""The law of relative positions: starting at a later position changes nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lab.laws.comparison import ROUNDINGS, run_trials
from lab.laws.decoding import compare_position
from lab.laws.law import Law
from lab.laws.probes import Probes
from lab.laws.verdict import Trial, Verdict
from lab.layers.state import Decoder

SHIFTS = (1, 1_000, 2_040, 32_760, 100_000)
ENDS = (2_040, 32_760)
"""Shifts just below the largest positions that fp16 and int16 hold exactly."""
BEYOND = 9
"""Least length that goes beyond them from there."""


@runtime_checkable
class RelativeDecoder(Decoder, Protocol):
    """A decoder that says whether its outputs depend on differences of positions only."""

    @property
    def relative(self) -> bool:
        """Whether shifting every position changes nothing."""
        ...


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """Starting at a later position gives the same outputs, where the module claims so.

    At position j a module in precision u knows an angle jθ, θ ≤ 1, to jθ·2u (θ and the product
    round). A rotated query and key err by 2u·j of their norms each, so their product errs by four
    roundings of its factors for each of the s + t positions passed. The outputs from the start err
    as well, which makes eight. How far a rounding of the input moves the output is the noise floor.

    Source: the bound of the RoPE properties, |Δ| ≤ ‖c‖‖b‖u·2θΣpositions, in the output's terms.
    """
    if not isinstance(module, RelativeDecoder):
        missing = "the module has no start, prefill and step, or does not declare `relative`"
        return Verdict(LAW.name, "not applicable", missing)
    if not module.relative:
        words = "the module says that its positions are absolute"
        return Verdict(LAW.name, "not applicable", words)
    found = []
    for shift in SHIFTS:

        def trials(module: nn.Module, x: Tensor, shift: int = shift) -> Iterator[Trial]:
            words = f"starting at position {shift} moves output {{position}} of row {{row}}"
            yield Trial(compare_shifted, {"shift": shift}, words)
            yield Trial(compare_shifted_step, {"shift": shift}, f"{words}, computed by a step")
            words = f"starting at position {shift}, the state ends at a wrong one in row {{row}}"
            yield Trial(check_shifted_position, {"shift": shift}, words)

        roundings = max(ROUNDINGS, 8 * (shift + probes.lengths[-1]))
        beyond = [n for n in probes.lengths if n >= BEYOND][:1] or probes.lengths[-1:]
        tried = probes.with_lengths(beyond) if shift in ENDS else probes
        found.append(run_trials(LAW.name, module, tried, trials, roundings, probes.angles))
        if found[-1].verdict == "fails":
            return found[-1]
    decided = [v for v in found if v.verdict == "holds"]
    shifted = [(f"shifted by {s}", v) for s, v in zip(SHIFTS, found, strict=True)]
    if not decided:
        words = f"shifted by {SHIFTS[0]}: {found[0].evidence}; none of the larger shifts is decided"
        return Verdict(LAW.name, "not decided", words)
    evidence = "; ".join(f"{how}: {v.evidence}" for how, v in shifted)
    left = "; ".join(how for how, v in shifted if v not in decided)
    worst = max(decided, key=lambda v: v.measured or 0.0)
    return replace(worst, evidence=evidence, left=left)


LAW = Law("relative", judge, conditions="evaluating", seeded=False)


@torch.no_grad()
def compare_shifted(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the first token stands at a later position.

    Both are computed from a state, because a leak makes those differ from forward's.
    """
    y, _ = module.prefill(x, module.start(x.shape[0]))
    shifted, _ = module.prefill(x, module.start(x.shape[0], shift))
    return shifted - y, y


@torch.no_grad()
def compare_shifted_step(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return how the first output moves when it is a step at a later position."""
    y, _ = module.step(x[:, 0], module.start(x.shape[0]))
    out, _ = module.step(x[:, 0], module.start(x.shape[0], shift))
    return (out - y)[:, None], y[:, None]


@torch.no_grad()
def check_shifted_position(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is wrong after a prefill that started later."""
    _, state = module.prefill(x, module.start(x.shape[0], shift))
    return compare_position(state, shift + x.shape[1])
