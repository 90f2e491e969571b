"""The laws of decoding: a state stands for all that was read, and no position is special."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, draw, relative
from lab.laws.verdict import Errors, Verdict, compared
from lab.layers.state import Decoder, State

SHIFTS = (1, 1_000, 100_000)


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
    return compared("prefill = step", module, probes, _decoding_errors)


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

        def errors(module: nn.Module, x: Tensor, shift: int = shift) -> Errors:
            return _shift_errors(module, x, shift)

        roundings = max(64, 8 * (shift + probes.inputs[-1].shape[1]))
        found.append(compared(law, module, probes, errors, roundings))
        if found[-1].verdict != "holds":
            return found[-1]
    evidence = "; ".join(f"by {s}: {v.evidence}" for s, v in zip(SHIFTS, found, strict=True))
    return Verdict(law, "holds", evidence)


@torch.no_grad()
def _decoding_errors(module: nn.Module, x: Tensor) -> Errors:
    assert isinstance(module, Decoder)
    y = module(x)
    b, t, _ = x.shape
    yield from _step_errors(module, x, y, module.start(b), 0, t)
    cuts = sorted({cut for cut in (1, t // 3, t // 2, t - 1) if 0 < cut < t})
    for cut in cuts:
        head, state = module.prefill(x[:, :cut])
        yield relative(head - y[:, :cut], y), f"prefill of {cut} tokens gives another output"
        # A state stands for what was read: going on elsewhere must leave it so.
        elsewhere = 8 * draw((b, 3, x.shape[-1]), seed=cut).to(x)
        module.step(elsewhere[:, 0], state)
        module.prefill(elsewhere, state)
        yield from _step_errors(module, x, y, state, cut, min(cut + 3, t))
        tail, end = module.prefill(x[:, cut:], state)
        words = f"prefill of the rest from the state after {cut} tokens gives another output"
        yield relative(tail - y[:, cut:], y), words
        yield _off(end, t), f"after prefills of {cut} and {t - cut} tokens the position is wrong"
        # Three parts: the state of a prefill that went on from a state.
        middle = (cut + t) // 2
        if cut < middle:
            _, state = module.prefill(x[:, cut:middle], state)
            yield from _step_errors(module, x, y, state, middle, min(middle + 3, t))


def _step_errors(
    module: Decoder, x: Tensor, y: Tensor, state: State, first: int, end: int
) -> Errors:
    for i in range(first, end):
        out, state = module.step(x[:, i], state)
        words = f"step {i}, from the state after {first} tokens, gives another output"
        yield relative(out - y[:, i], y), words
        yield _off(state, i + 1), f"after step {i} the state's position is wrong"


def _off(state: State, position: int) -> float:
    """Return by how many tokens a state's position is off."""
    return float((state.position - position).abs().max())


@torch.no_grad()
def _shift_errors(module: nn.Module, x: Tensor, shift: int) -> Errors:
    assert isinstance(module, Decoder)
    y = module(x)
    state = module.start(x.shape[0], shift)
    shifted, end = module.prefill(x, state)
    yield relative(shifted - y, y), f"started at position {shift}, it gives another output"
    yield _off(end, shift + x.shape[1]), f"started at position {shift}, it ends at a wrong one"
    out, _ = module.step(x[:, 0], state)
    words = f"the first step at position {shift} gives another output"
    yield relative(out - y[:, 0], y), words
