"""The law of decoding: forward's outputs come out of any split into prefills and steps."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.comparison import run_trials
from lab.laws.law import Law
from lab.laws.leaking import attribute_to_leak
from lab.laws.probes import Probes, draw
from lab.laws.special import Special, list_special, name_special, put_special
from lab.laws.trial import Trial
from lab.laws.verdict import Verdict
from lab.layers.state import Decoder, State

FAR = 3
"""Steps taken from the state after a prefill."""
SHORT = 16
"""Longest input in which special ones are put."""
MANY = 130
"""Steps taken from the start."""


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """Any split into prefills and steps gives the outputs of forward, and changes no state."""
    if not isinstance(module, Decoder):
        if probes.undecoded:
            return Verdict(LAW.name, "not decided", probes.undecoded)
        missing = "the module has no start, prefill and step"
        return Verdict(LAW.name, "not applicable", missing)
    found = run_trials(LAW.name, module, probes, _list_trials, longer=_list_longer_trials)
    return attribute_to_leak(found, module, probes, _list_trials)


LAW = Law("prefill = step", judge, conditions="evaluating", seeded=False)


def _list_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    t = x.shape[1]
    other = "moves output {position} of row {row}"
    words = f"decoding token by token from the start {other}"
    yield Trial(compare_steps, {"cut": 0, "end": min(t, MANY)}, words)
    for special in list_special(module) if 1 < t <= SHORT else ():
        words = (
            f"with {name_special(special)} at position {t // 2}, decoding token by token {other}"
        )
        yield Trial(compare_steps_with_special, {"s": t // 2, "special": special}, words)
    words = "after one step, row {row}'s state has a wrong position"
    yield Trial(check_step_position, {"cut": 0}, words)
    for cut in sorted({cut for cut in (1, t // 3, t // 2, t - 1) if 0 < cut < t}):
        end = min(cut + FAR, t)
        words = f"splitting forward into prefills of {cut} and {t - cut} tokens {other}"
        yield Trial(compare_two_prefills, {"cut": cut}, words)
        words = f"decoding token by token after a prefill of {cut} {other}"
        yield Trial(compare_steps, {"cut": cut, "end": end}, words)
        words = f"using the state after {cut} tokens a second time {other}"
        yield Trial(compare_second_use, {"cut": cut, "end": end}, words)
        words = f"after prefills of {cut} and {t - cut}, row {{row}}'s state has a wrong position"
        yield Trial(check_prefill_position, {"cut": cut}, words)
        middle = (cut + t) // 2
        if cut < middle:
            given = {"cut": cut, "middle": middle, "end": min(middle + FAR, t)}
            words = f"decoding token by token after prefills of {cut} and {middle - cut} {other}"
            yield Trial(compare_steps_after_two, given, words)


def _list_longer_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    """Yield the trials of long inputs, which may exceed a cache."""
    t = x.shape[1]
    words = f"decoding token by token after a prefill of {t - FAR} moves output {{position}} of "
    yield Trial(compare_steps, {"cut": t - FAR, "end": t}, f"{words}row {{row}}")
    words = f"splitting forward into prefills of {t // 2} and {t - t // 2} tokens moves output "
    yield Trial(compare_two_prefills, {"cut": t // 2}, f"{words}{{position}} of row {{row}}")


@torch.no_grad()
def compare_steps(module: Any, x: Tensor, cut: int, end: int) -> tuple[Tensor, Tensor]:
    """Return how outputs from a cut to an end move when each is computed by a step."""
    y = module(x)
    state = module.prefill(x[:, :cut])[1] if cut else module.start(x.shape[0])
    return take_steps(module, x, y, state, cut, end), y


def compare_steps_with_special(
    module: Any, x: Tensor, s: int, special: Special
) -> tuple[Tensor, Tensor]:
    """Return how outputs move when each is computed by a step and a special input is at s."""
    return compare_steps(module, put_special(x, special, slice(s, s + 1)), 0, x.shape[1])


@torch.no_grad()
def compare_two_prefills(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return how outputs move when they are computed by two prefills."""
    head, state = module.prefill(x[:, :cut])
    tail, _ = module.prefill(x[:, cut:], state)
    y = module(x)
    return torch.cat([head, tail], 1) - y, y


@torch.no_grad()
def compare_second_use(module: Any, x: Tensor, cut: int, end: int) -> tuple[Tensor, Tensor]:
    """Return how steps move when the state that they start from has been used before."""
    y = module(x)
    _, state = module.prefill(x[:, :cut])
    elsewhere = 8 * draw((x.shape[0], 3, x.shape[2]), seed=cut).to(x)
    module.step(elsewhere[:, 0], state)
    module.prefill(elsewhere, state)
    return take_steps(module, x, y, state, cut, end), y


@torch.no_grad()
def compare_steps_after_two(
    module: Any, x: Tensor, cut: int, middle: int, end: int
) -> tuple[Tensor, Tensor]:
    """Return how steps move after two prefills, the second from the state of the first."""
    y = module(x)
    _, state = module.prefill(x[:, :cut])
    _, state = module.prefill(x[:, cut:middle], state)
    return take_steps(module, x, y, state, middle, end), y


def take_steps(module: Any, x: Tensor, y: Tensor, state: State, cut: int, end: int) -> Tensor:
    """Return how outputs of steps differ from outputs y; zero where no step was taken."""
    difference = torch.zeros_like(y)
    for i in range(cut, end):
        out, state = module.step(x[:, i], state)
        difference[:, i] = out - y[:, i]
    return difference


@torch.no_grad()
def check_step_position(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is wrong after a step."""
    state = module.start(x.shape[0], cut)
    _, state = module.step(x[:, 0], state)
    return compare_position(state, cut + 1)


@torch.no_grad()
def check_prefill_position(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is wrong after two prefills."""
    _, state = module.prefill(x[:, :cut])
    _, state = module.prefill(x[:, cut:], state)
    return compare_position(state, x.shape[1])


def compare_position(state: State, position: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position differs from what it should be, and ones.

    A state that has no attribute `position` tells none, and is right.
    """
    if not hasattr(state, "position"):
        return torch.zeros(1, 1), torch.ones(1, 1)
    difference = (state.position - position).double()[:, None]
    return difference, torch.ones_like(difference)
