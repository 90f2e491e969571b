"""The law of padding: what a mask leaves out is as if it were not there."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lab.laws.adapters.carried import PATTERNS
from lab.laws.probes import Probes, draw
from lab.laws.verdict import Trial, Verdict, compared
from lab.layers.state import Decoder


@runtime_checkable
class PaddedDecoder(Decoder, Protocol):
    """A decoder that promises less than every padding."""

    @property
    def paddings(self) -> tuple[str, ...]:
        """Which of `PATTERNS` move nothing."""
        ...


def padding(module: nn.Module, probes: Probes) -> Verdict:
    """Padding moves no real position, no state and no gradient, and nothing is NaN.

    Each row has its own number of tokens, among numbers far larger; a module that promises every
    padding is given one more row of padding alone, and goes on from a padded state through padding.
    """
    law = "padding"
    if not isinstance(module, Decoder):
        return Verdict(law, "not applicable", "the module has no start, prefill and step")
    promised = module.paddings if isinstance(module, PaddedDecoder) else PATTERNS
    if not promised:
        return Verdict(law, "not applicable", "the module takes no mask of padding")
    every = set(promised) == set(PATTERNS)

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        for pattern in promised:
            yield from _trials(pattern, every)

    # Five trials a pattern: every other length, and the longest, must do.
    few = sorted({*probes.lengths[::2], probes.lengths[-1]})
    return compared(law, module, replace(probes, lengths=few), trials)


def _trials(pattern: str, every: bool) -> Iterator[Trial]:
    given = {"pattern": pattern, "every": every}
    words = f"{pattern} padding gives NaN or infinity at position {{position}} of row {{row}}"
    yield Trial(not_finite, given, words)
    words = f"{pattern} padding moves a real position's output: row {{row}}, token {{position}}"
    yield Trial(moved_by_padding, given, words)
    words = f"{pattern} padding moves an output after it, by the state, in row {{row}}"
    yield Trial(moved_after_padding, given, words)
    if every:
        words = f"a row of padding alone moves the step after it, {pattern}"
        yield Trial(moved_by_padding_alone, {"pattern": pattern}, words)
    words = (
        f"{pattern} padding has a gradient that is not zero, or NaN, at {{position}} of row {{row}}"
    )
    yield Trial(gradient_at_padding, given, words)


@torch.no_grad()
def not_finite(module: Any, x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return infinity where an output, fresh or from a state, is not finite, padded or not."""
    keep, _ = kept(x, pattern, every)
    first, state = module.prefill(padded(x, keep), None, keep)
    tokens, keep = further(x, pattern, every)
    second, _ = module.prefill(padded(tokens, keep), state, keep)
    y = torch.cat([first, second], 1)
    return torch.where(y.isfinite(), 0.0, torch.inf), torch.ones_like(y)


@torch.no_grad()
def moved_by_padding(module: Any, x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return how the outputs of real tokens move among padding."""
    keep, counts = kept(x, pattern, every)
    found, _ = module.prefill(padded(x, keep), None, keep)
    rows = [module(x[row : row + 1, :count]) for row, count in enumerate(counts)]
    difference = found.new_zeros(*x.shape[:2], found.shape[2])
    for row, count in enumerate(counts):
        difference[row, :count] = found[row][keep[row]] - rows[row][0]
    return difference, rows[0]


@torch.no_grad()
def moved_after_padding(module: Any, x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return how a further prefill, padded if every padding is promised, and a step move."""
    keep, counts = kept(x, pattern, every)
    _, state = module.prefill(padded(x, keep), None, keep)
    tokens, keep = further(x, pattern, every)
    second, state = module.prefill(padded(tokens, keep), state, keep)
    third, _ = module.step(last_token(x, every), state)
    difference, references = [], []
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        _, state = module.prefill(x[one, :count])
        y, state = module.prefill(tokens[one], state)
        z, _ = module.step(last_token(x, every)[one], state)
        references.append(torch.cat([y, z[:, None]], 1))
        found = torch.cat([second[row][keep[row]][None], third[one, None]], 1)
        difference.append(found - references[-1])
    return torch.cat(difference), torch.cat(references)


@torch.no_grad()
def moved_by_padding_alone(module: Any, x: Tensor, pattern: str) -> tuple[Tensor, Tensor]:
    """Return how a step moves after a row that was padding and nothing else."""
    keep, _ = kept(x, pattern, True)
    _, state = module.prefill(padded(x, keep), None, keep)
    token = last_token(x, True)
    found, _ = module.step(token, state)
    y, _ = module.step(token[-1:], module.start(1))
    return (found[-1:] - y)[:, None], y


def gradient_at_padding(module: Any, x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient that real outputs have at padding, and all that is not finite.

    Masks that meet an infinity give NaN backward where forward looks right.
    """
    keep, _ = kept(x, pattern, every)
    inputs = padded(x, keep).requires_grad_()
    y = module.prefill(inputs, None, keep)[0][keep]
    if not y.requires_grad:
        return torch.zeros_like(inputs), inputs
    (grad,) = torch.autograd.grad((y * draw(y.shape, seed=0).to(y)).sum(), inputs)
    return grad.where(~keep[..., None] | ~grad.isfinite(), 0), grad


def kept(x: Tensor, pattern: str, every: bool) -> tuple[Tensor, list[int]]:
    """Return where each row's tokens stand among half as many again, and how many it has.

    The first has all t of x, each further one fewer, one at least. One more row, without any, is
    last where every padding is promised.
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


def padded(x: Tensor, keep: Tensor) -> Tensor:
    """Return each row's first tokens where it keeps any, large numbers elsewhere."""
    y = 30 * draw((*keep.shape, x.shape[-1]), seed=keep.shape[1]).to(x)
    for row in range(len(x)):
        y[row, keep[row]] = x[row, : int(keep[row].sum())]
    return y


def further(x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return three further tokens a row, and where they stand among the padding promised."""
    b, _, d = x.shape
    tokens = draw((b, 3, d), seed=x.shape[1]).to(x)
    if not every:
        return tokens, torch.ones(b, 3, dtype=torch.bool, device=x.device)
    places = {"left": [2, 3, 4], "right": [0, 1, 2], "scattered": [0, 2, 3]}
    keep = torch.zeros(b + 1, 5, dtype=torch.bool, device=x.device)
    keep[:b, places[pattern]] = True
    return tokens, keep


def last_token(x: Tensor, every: bool) -> Tensor:
    """Return one more token a row."""
    return draw((x.shape[0] + every, x.shape[2]), seed=x.shape[1] + 1).to(x)
