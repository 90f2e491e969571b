"""The law of padding: tokens that a mask leaves out have no effect."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lab.laws.adapters.carried import PATTERNS
from lab.laws.comparison import run_trials
from lab.laws.law import Law
from lab.laws.leaking import attribute_to_leak
from lab.laws.noise import lower_precision
from lab.laws.probes import Probes, draw
from lab.laws.trial import Trial
from lab.laws.verdict import Verdict
from lab.layers.state import Decoder


@runtime_checkable
class PaddedDecoder(Decoder, Protocol):
    """A decoder that supports some patterns of padding only."""

    @property
    def paddings(self) -> tuple[str, ...]:
        """The patterns, of `PATTERNS`, that must have no effect."""
        ...


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """Padding moves no real position, no state and no gradient, and nothing is NaN.

    Each row has its own number of tokens, and padding holds far larger numbers. A module that
    supports every pattern is also given a row of padding only, and goes on from a padded state
    through further padding.

    Padding may take up positions where only their differences count. They differ by the rounding of
    a table of angles, which converting the module to fp64 does not undo.
    """
    if not isinstance(module, Decoder):
        return Verdict(LAW.name, "not applicable", "the module has no start, prefill and step")
    patterns = module.paddings if isinstance(module, PaddedDecoder) else PATTERNS
    if not patterns:
        return Verdict(LAW.name, "not applicable", "the module takes no mask of padding")
    every = set(patterns) == set(PATTERNS)

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        for pattern in patterns:
            yield from _list_trials(pattern, every)

    # There are five trials per pattern, so only every other length is tried, and the longest.
    few = sorted({*probes.lengths[::2], probes.lengths[-1]})
    few = probes.with_lengths(few)
    inside = lower_precision(probes.inside, probes.own) if _has_fixed_table(module) else None
    found = run_trials(LAW.name, module, few, trials, inside=inside)
    return attribute_to_leak(found, module, few, trials)


LAW = Law("padding", judge, conditions="evaluating", seeded=False)


def _has_fixed_table(module: nn.Module) -> bool:
    """Whether a module has a table of numbers that does not learn."""
    frozen = (p for p in module.parameters() if not p.requires_grad)
    return any(
        x.is_floating_point() and x.ndim > 1 and len(x) > 1 for x in (*module.buffers(), *frozen)
    )


def _list_trials(pattern: str, every: bool) -> Iterator[Trial]:
    given = {"pattern": pattern, "every": every}
    words = f"{pattern} padding gives NaN or infinity at position {{position}} of row {{row}}"
    yield Trial(find_not_finite, given, words)
    words = f"{pattern} padding moves the output of real token {{position}} in row {{row}}"
    yield Trial(compare_padded, given, words)
    words = f"through the state, {pattern} padding moves a later output of row {{row}}"
    yield Trial(compare_after_padding, given, words)
    if every:
        words = f"a row of padding only moves the step after it ({pattern} padding in other rows)"
        yield Trial(compare_after_padding_only, {"pattern": pattern}, words)
    words = (
        f"{pattern} padding has a gradient that is not zero, or NaN, at {{position}} of row {{row}}"
    )
    yield Trial(measure_gradient_at_padding, given, words)


@torch.no_grad()
def find_not_finite(module: Any, x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return infinity where an output, at a token or at padding, is not finite."""
    keep, _ = place_tokens(x, pattern, every)
    first, state = module.prefill(pad(x, keep), None, keep)
    tokens, keep = draw_further(x, pattern, every)
    second, _ = module.prefill(pad(tokens, keep), state, keep)
    y = torch.cat([first, second], 1)
    return torch.where(y.isfinite(), 0.0, torch.inf), torch.ones_like(y)


@torch.no_grad()
def compare_padded(module: Any, x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return how the outputs of real tokens move when padding stands among them."""
    keep, counts = place_tokens(x, pattern, every)
    found, _ = module.prefill(pad(x, keep), None, keep)
    rows = [module(x[row : row + 1, :count]) for row, count in enumerate(counts)]
    difference = found.new_zeros(*x.shape[:2], found.shape[2])
    for row, count in enumerate(counts):
        difference[row, :count] = found[row][keep[row]] - rows[row][0]
    return difference, rows[0]


@torch.no_grad()
def compare_after_padding(
    module: Any, x: Tensor, pattern: str, every: bool
) -> tuple[Tensor, Tensor]:
    """Return how outputs after padding move: of a prefill, with padding if `every`, and a step."""
    keep, counts = place_tokens(x, pattern, every)
    _, state = module.prefill(pad(x, keep), None, keep)
    tokens, keep = draw_further(x, pattern, every)
    second, state = module.prefill(pad(tokens, keep), state, keep)
    third, _ = module.step(draw_last(x, every), state)
    difference, references = [], []
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        _, state = module.prefill(x[one, :count])
        y, state = module.prefill(tokens[one], state)
        z, _ = module.step(draw_last(x, every)[one], state)
        references.append(torch.cat([y, z[:, None]], 1))
        found = torch.cat([second[row][keep[row]][None], third[one, None]], 1)
        difference.append(found - references[-1])
    return torch.cat(difference), torch.cat(references)


@torch.no_grad()
def compare_after_padding_only(module: Any, x: Tensor, pattern: str) -> tuple[Tensor, Tensor]:
    """Return how a step moves after a row of padding only."""
    keep, _ = place_tokens(x, pattern, True)
    _, state = module.prefill(pad(x, keep), None, keep)
    token = draw_last(x, True)
    found, _ = module.step(token, state)
    y, _ = module.step(token[-1:], module.start(1))
    return (found[-1:] - y)[:, None], y


def measure_gradient_at_padding(
    module: Any, x: Tensor, pattern: str, every: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of real outputs at padding, and any gradient that is not finite.

    A mask that meets an infinity can give NaN in the backward pass while the output looks right.
    """
    keep, _ = place_tokens(x, pattern, every)
    inputs = pad(x, keep).requires_grad_()
    y = module.prefill(inputs, None, keep)[0][keep]
    if not y.requires_grad:
        return torch.zeros_like(inputs), inputs
    (grad,) = torch.autograd.grad((y * draw(y.shape, seed=0).to(y)).sum(), inputs)
    return grad.where(~keep[..., None] | ~grad.isfinite(), 0), grad


def place_tokens(x: Tensor, pattern: str, every: bool) -> tuple[Tensor, list[int]]:
    """Return a mask of where each row's tokens stand among padding, and each row's token count.

    The mask is t + 1 + t // 2 long. The first row has all t tokens of x, each further row fewer, at
    least one. With `every`, one more row without a token is last.
    """
    b, t, _ = x.shape
    counts = [t - row * (t - 1) // b for row in range(b)]
    keep = torch.zeros(b + every, t + 1 + t // 2, dtype=torch.bool)
    generator = torch.Generator().manual_seed(t)
    for row, count in enumerate(counts):
        at = torch.arange(count)
        if pattern == "left":
            at = keep.shape[1] - 1 - at
        elif pattern == "scattered":
            at = torch.randperm(keep.shape[1], generator=generator)[:count]
        keep[row, at] = True
    return keep.to(x.device), counts


def pad(x: Tensor, keep: Tensor) -> Tensor:
    """Return each row's first tokens where `keep` is True, and large numbers elsewhere."""
    y = 30 * draw((*keep.shape, x.shape[-1]), seed=keep.shape[1]).to(x)
    for row in range(len(x)):
        y[row, keep[row]] = x[row, : int(keep[row].sum())]
    return y


def draw_further(x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return three further tokens per row, and a mask of where they stand among padding."""
    b, _, d = x.shape
    tokens = draw((b, 3, d), seed=x.shape[1]).to(x)
    if not every:
        return tokens, torch.ones(b, 3, dtype=torch.bool, device=x.device)
    places = {"left": [2, 3, 4], "right": [0, 1, 2], "scattered": [0, 2, 3]}
    keep = torch.zeros(b + 1, 5, dtype=torch.bool, device=x.device)
    keep[:b, places[pattern]] = True
    return tokens, keep


def draw_last(x: Tensor, every: bool) -> Tensor:
    """Return one more token per row."""
    return draw((x.shape[0] + every, x.shape[2]), seed=x.shape[1] + 1).to(x)
