"""The laws of decoding: a state stands for all that was read, and no position is special."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, draw
from lab.laws.verdict import ROUNDINGS, Trial, Verdict, compared
from lab.layers.state import Decoder, State

SHIFTS = (1, 1_000, 100_000)
FAR = 3  # steps taken from the state after a prefill
MANY = 130  # steps taken from the start


@runtime_checkable
class RelativeDecoder(Decoder, Protocol):
    """A decoder that says whether only differences of positions count."""

    @property
    def relative(self) -> bool:
        """Whether shifting every position changes nothing."""
        ...


def prefill_equals_step(module: nn.Module, probes: Probes) -> Verdict:
    """The outputs of forward come out of any split into prefills and steps; no state changes."""
    if not isinstance(module, Decoder):
        missing = "the module has no start, prefill and step"
        return Verdict("prefill = step", "not applicable", missing)
    return compared("prefill = step", module, probes, _decoding_trials)


def relative_positions(module: nn.Module, probes: Probes) -> Verdict:
    """Starting at a later position gives the same outputs, where the module says so.

    At position j a module in precision u knows an angle jθ, θ ≤ 1, to jθ·2u (θ and the product
    round), so a rotated query and key err by 2u·j of their norms each, and their product by four
    roundings of its factors for each of the s + t positions passed, as from the start, which errs
    as well: eight. What a rounding of the input does to the output is the noise floor.

    Source: the bound of the RoPE properties, |Δ| ≤ ‖c‖‖b‖u·2θΣpositions, in the output's terms.
    """
    law = "relative"
    if not isinstance(module, RelativeDecoder):
        missing = "the module has no start, prefill and step, or no word on positions: relative"
        return Verdict(law, "not applicable", missing)
    if not module.relative:
        return Verdict(law, "not applicable", "the module says that its positions are absolute")
    found = []
    for shift in SHIFTS:

        def trials(module: nn.Module, x: Tensor, shift: int = shift) -> Iterator[Trial]:
            words = f"started at position {shift}, row {{row}} gives another output {{position}}"
            yield Trial(moved_by_shift, {"shift": shift}, words)
            yield Trial(moved_by_shifted_step, {"shift": shift}, f"{words} of a step")
            words = f"started at position {shift}, row {{row}} ends at a wrong one"
            yield Trial(position_off_by_shift, {"shift": shift}, words)

        roundings = max(ROUNDINGS, 8 * (shift + probes.lengths[-1]))
        found.append(compared(law, module, probes, trials, roundings, probes.angles))
        if found[-1].verdict == "fails":
            return found[-1]
    decided = [v for v in found if v.verdict == "holds"]
    evidence = "; ".join(f"by {s}: {v.evidence}" for s, v in zip(SHIFTS, found, strict=True))
    if not decided:
        return Verdict(law, "not decided", evidence)
    left = "; ".join(f"by {s}" for s, v in zip(SHIFTS, found, strict=True) if v not in decided)
    worst = max(decided, key=lambda v: v.measured or 0.0)
    return replace(worst, evidence=evidence, left=left)


def _decoding_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    t = x.shape[1]
    other = "moves output {position} of row {row}"
    yield Trial(
        moved_by_steps, {"cut": 0, "end": min(t, MANY)}, f"going by steps from the start {other}"
    )
    yield Trial(position_off_by_steps, {"cut": 0}, "after a step, row {row}'s position is wrong")
    for cut in sorted({cut for cut in (1, t // 3, t // 2, t - 1) if 0 < cut < t}):
        end = min(cut + FAR, t)
        yield Trial(
            moved_by_prefills, {"cut": cut}, f"going by prefills of {cut} and {t - cut} {other}"
        )
        words = f"going by steps after a prefill of {cut} {other}"
        yield Trial(moved_by_steps, {"cut": cut, "end": end}, words)
        words = f"going on a second time from the state after {cut} {other}"
        yield Trial(moved_by_forks, {"cut": cut, "end": end}, words)
        words = f"after prefills of {cut} and {t - cut} row {{row}}'s position is wrong"
        yield Trial(position_off_by_prefills, {"cut": cut}, words)
        middle = (cut + t) // 2
        if cut < middle:
            given = {"cut": cut, "middle": middle, "end": min(middle + FAR, t)}
            words = f"going by steps after prefills of {cut} and {middle - cut} {other}"
            yield Trial(moved_by_thirds, given, words)


@torch.no_grad()
def moved_by_steps(module: Any, x: Tensor, cut: int, end: int) -> tuple[Tensor, Tensor]:
    """Return how outputs from a cut to an end move when each is a step of its own."""
    y = module(x)
    state = module.prefill(x[:, :cut])[1] if cut else module.start(x.shape[0])
    return _stepped(module, x, y, state, cut, end), y


@torch.no_grad()
def moved_by_prefills(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return how outputs move when they are prefilled in two parts."""
    head, state = module.prefill(x[:, :cut])
    tail, _ = module.prefill(x[:, cut:], state)
    y = module(x)
    return torch.cat([head, tail], 1) - y, y


@torch.no_grad()
def moved_by_forks(module: Any, x: Tensor, cut: int, end: int) -> tuple[Tensor, Tensor]:
    """Return how steps move when others were taken from the same state before."""
    y = module(x)
    _, state = module.prefill(x[:, :cut])
    elsewhere = 8 * draw((x.shape[0], 3, x.shape[2]), seed=cut).to(x)
    module.step(elsewhere[:, 0], state)
    module.prefill(elsewhere, state)
    return _stepped(module, x, y, state, cut, end), y


@torch.no_grad()
def moved_by_thirds(
    module: Any, x: Tensor, cut: int, middle: int, end: int
) -> tuple[Tensor, Tensor]:
    """Return how steps move after a prefill that itself went on from a state."""
    y = module(x)
    _, state = module.prefill(x[:, :cut])
    _, state = module.prefill(x[:, cut:middle], state)
    return _stepped(module, x, y, state, middle, end), y


def _stepped(module: Any, x: Tensor, y: Tensor, state: State, cut: int, end: int) -> Tensor:
    """Return what steps differ from outputs y, zero elsewhere."""
    difference = torch.zeros_like(y)
    for i in range(cut, end):
        out, state = module.step(x[:, i], state)
        difference[:, i] = out - y[:, i]
    return difference


@torch.no_grad()
def position_off_by_steps(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is off after a step."""
    state = module.start(x.shape[0], cut)
    _, state = module.step(x[:, 0], state)
    return _off(state, cut + 1)


@torch.no_grad()
def position_off_by_prefills(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is off after two prefills."""
    _, state = module.prefill(x[:, :cut])
    _, state = module.prefill(x[:, cut:], state)
    return _off(state, x.shape[1])


@torch.no_grad()
def position_off_by_shift(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is off after a prefill that started later."""
    _, state = module.prefill(x, module.start(x.shape[0], shift))
    return _off(state, shift + x.shape[1])


def _off(state: State, position: int) -> tuple[Tensor, Tensor]:
    off = (state.position - position).double()[:, None]
    return off, torch.ones_like(off)


@torch.no_grad()
def moved_by_shift(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the first token stands at a later position."""
    y = module(x)
    shifted, _ = module.prefill(x, module.start(x.shape[0], shift))
    return shifted - y, y


@torch.no_grad()
def moved_by_shifted_step(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return how the first output moves when it is a step at a later position."""
    y = module(x)
    out, _ = module.step(x[:, 0], module.start(x.shape[0], shift))
    return (out - y[:, 0])[:, None], y
