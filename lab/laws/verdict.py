"""What a law says of a module, and how it compares outputs that must agree."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, draw, noise_floor, precision_name, relative
from lab.laws.refusal import REFUSALS, raised
from lab.laws.reproduction import written

Outcome = Literal["holds", "fails", "not applicable", "not decided"]

ROUNDINGS = 64
NOISY = 1e-2
MOST_LENGTHS = 64


@dataclass(frozen=True)
class Verdict:
    """A law's outcome on a module, with the numbers behind it.

    Attributes:
        law: its name.
        verdict: the outcome.
        evidence: the numbers, in words.
        counterexample: the smallest that was found, in words; None unless the law fails.
        measured: the number that the law is decided by: an error, a growth, a count of rows.
        allowed: what it may be.
        snippet: a program that shows the failure without this project, and ends with code 1.
        where: the counter-example's numbers by name: length, rows, row, position, the check's own.
        left: what was not decided although the law holds, in words.
    """

    law: str
    verdict: Outcome
    evidence: str
    counterexample: str | None = None
    measured: int | float | None = None
    allowed: int | float | None = None
    snippet: str | None = None
    where: Mapping[str, Any] | None = None
    left: str = ""


Law = Callable[[nn.Module, Probes], Verdict]

Check = Callable[..., tuple[Tensor, Tensor]]
"""check(module, x, **given) → a difference [b t …] that a law says is zero, and its reference."""


@dataclass(frozen=True)
class Trial:
    """One thing that a law says is equal.

    Attributes:
        check: what differs, printed into reproductions as it is.
        given: the check's further arguments, literals.
        words: what happens where it differs; {row} and {position} say where most.
        refusable: whether a module may refuse the check's input, by its length or its rows.
    """

    check: Check
    given: Mapping[str, Any]
    words: str
    refusable: bool = False


@dataclass
class Undecided:
    """What was not compared: lengths with too much noise, each with its reason, and later ones."""

    noisy: dict[int, str] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        words = [f"length {length}: {why}" for length, why in list(self.noisy.items())[:1]]
        if len(self.noisy) > 1:
            words.append(f"{len(self.noisy) - 1} more lengths likewise")
        if self.late:
            words.append(f"no time for {', '.join(map(str, self.late))}")
        return "; ".join(words)


Trials = Callable[[nn.Module, Tensor], Iterable[Trial]]
"""What a law tries on an input of a module."""


@dataclass(frozen=True)
class _Found:
    """A trial on an input, and by how much it differs where most."""

    trial: Trial
    x: Tensor
    error: float
    allowed: float
    row: int
    position: int

    @property
    def words(self) -> str:
        words = self.trial.words.format(row=self.row, position=self.position)
        return f"length {self.x.shape[1]}: {words}"


def compared(
    law: str,
    module: nn.Module,
    probes: Probes,
    trials: Trials,
    roundings: int = ROUNDINGS,
    inside: torch.dtype | None = None,
) -> Verdict:
    """Hold what trials find against the noise floor, shortest probe first.

    Args:
        law: its name.
        module: as it is.
        probes: what it is tried on.
        trials: of an input.
        roundings: how many times the noise floor an error may be.
        inside: the precision inside the module that matters to the trials; None for the lowest.
    """
    floor = partial(noise_floor, inside=inside or probes.inside)
    began, worst, allowed = time.monotonic(), 0.0, 0.0
    tried: list[int] = []
    undecided = Undecided()
    for length in probes.lengths:
        if tried and time.monotonic() - began > probes.seconds:
            undecided.late = [late for late in probes.lengths if late >= length]
            break
        x = probes.input(length)
        remembered = _Remembered(module, x)
        bound = roundings * floor(remembered, x)
        # Past this, noise would hide a leak, a dependence on the order of rounding, say.
        if not bound < NOISY or not remembered.repeats():
            undecided.noisy[length] = _noise(module, x, bound / roundings)
            continue
        try:
            for trial in trials(module, x):
                found = _tried(remembered, x, trial, bound)
                if not found.error <= bound:
                    again = partial(_again, module, roundings=roundings, floor=floor)
                    return _failure(
                        law, _smallest(probes, found, max(tried, default=0), trials, again), probes
                    )
                worst, allowed = max(worst, found.error), max(allowed, bound)
        except REFUSALS as error:
            undecided.noisy[length] = raised(error)
            continue
        tried.append(length)
    if not tried:
        return Verdict(law, "not decided", str(undecided), allowed=NOISY)
    lengths = f"lengths {', '.join(map(str, tried))} in {precision_name(probes.dtype)}"
    evidence = f"worst relative error {worst:.2g} of {allowed:.2g} allowed, {lengths}"
    evidence += f"; not decided: {undecided}" if str(undecided) else ""
    return Verdict(law, "holds", evidence, measured=worst, allowed=allowed, left=str(undecided))


def _noise(module: nn.Module, x: Tensor, floor: float) -> str:
    """Return why nothing can be compared on an input."""
    with torch.no_grad():
        first, second = module(x), module(x)
    if not first.isfinite().all():
        row, position = where(torch.where(first.isfinite(), 0.0, 1.0))
        return f"output {position} of row {row} is not finite"
    if not torch.equal(first, second):
        return f"a second call moves the output by {relative(second - first, first):.2g}"
    return f"rounding the input moves the output by {floor:.2g}"


class _Remembered(nn.Module):
    """A module that knows its output for one input, which every check begins with."""

    def __init__(self, module: nn.Module, x: Tensor):
        super().__init__()
        self.module, self.x = module, x
        with torch.no_grad():
            self.y = module(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.y if x is self.x and not torch.is_grad_enabled() else self.module(x)

    @torch.no_grad()
    def repeats(self) -> bool:
        """Whether a second call gives the same but for rounding."""
        return relative(self.module(self.x) - self.y, self.y) <= torch.finfo(torch.float32).eps

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return deepcopy(self.module, memo)


def _tried(module: nn.Module, x: Tensor, trial: Trial, allowed: float) -> _Found:
    try:
        difference, reference = trial.check(module, x, **trial.given)
    except REFUSALS:
        if not trial.refusable:
            raise
        difference, reference = torch.zeros_like(x), x
    error = relative(difference.detach(), reference.detach())
    row, position = (0, 0) if error == 0 else where(difference)
    return _Found(trial, x, error, allowed, row, position)


def where(difference: Tensor) -> tuple[int, int]:
    """Return the row and the position at which a difference [b t …] is largest, or not a number."""
    sizes = (
        difference.detach().abs().flatten(2).amax(2) if difference.ndim > 2 else difference.abs()
    )
    worst = int(sizes.nan_to_num(math.inf).argmax())
    return worst // sizes.shape[1], worst % sizes.shape[1]


def _smallest(
    probes: Probes,
    found: _Found,
    held: int,
    trials: Trials,
    again: Callable[[Tensor, Iterable[Trial] | Trials], _Found | None],
) -> _Found:
    """Return a failure of the fewest rows, then of the fewest tokens beyond those that hold."""
    began, length = time.monotonic(), found.x.shape[1]
    for rows in range(1, probes.batch):
        fewer = again(probes.input(length, rows), [found.trial])
        if fewer is not None:
            found = fewer
            break
    rows = found.x.shape[0]
    for shorter in range(held + 1, min(length, held + MOST_LENGTHS)):
        if time.monotonic() - began > probes.seconds:
            break
        x = probes.input(shorter, rows)
        fewer = again(x, trials)
        if fewer is not None:
            return fewer
    return found


def _again(
    module: nn.Module,
    x: Tensor,
    trials: Iterable[Trial] | Trials,
    roundings: int,
    floor: Callable[[nn.Module, Tensor], float],
) -> _Found | None:
    """Return the first of the trials that fails on an input, where the module takes it."""
    try:
        bound = roundings * floor(module, x)
        if not bound < NOISY:
            return None
        for trial in trials(module, x) if callable(trials) else trials:
            again = _tried(module, x, trial, bound)
            if not again.error <= bound:
                return again
    except REFUSALS:
        return None
    return None


def _failure(law: str, found: _Found, probes: Probes) -> Verdict:
    evidence = f"relative error {found.error:.2g} against {found.allowed:.2g} allowed"
    given = "".join(f", {name}={value!r}" for name, value in found.trial.given.items())
    name = found.trial.check.__name__
    body = f"""
        {drawn(probes, found.x.shape[0], found.x.shape[1])}
        difference, reference = {name}(module, x{given})
        error = relative(difference.detach(), reference.detach())
        print({f"{found.words}: relative error"!r}, error, "of {found.allowed:.2g} allowed")
        sys.exit(not error <= {found.allowed!r})
    """
    snippet = written(
        probes.origin, (draw, relative, found.trial.check), body, f"{law}: {found.words}"
    )
    rows, length = found.x.shape[:2]
    where = {"length": length, "rows": rows, "row": found.row, "position": found.position}
    where |= found.trial.given
    return Verdict(law, "fails", evidence, found.words, found.error, found.allowed, snippet, where)


def drawn(probes: Probes, batch: int, length: int) -> str:
    """Return the line of a reproduction that draws an input."""
    shape = f"({batch}, {length}, {probes.d_model})"
    return f"x = draw({shape}, seed={probes.seed}).to({probes.device.type!r}, {probes.dtype})"
