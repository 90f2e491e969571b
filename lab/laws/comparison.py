"""Comparing outputs that a law says are equal, against the module's noise floor."""

import math
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.law import (
    LEAST,
    IncomparableError,
    Timer,
    Trial,
    Trials,
    Verdict,
    describe_refusal,
    read_clock,
)
from lab.laws.noise import lower_precision, noise_floor, relative_error
from lab.laws.probes import Probes, copy_module, draw, name_precision
from lab.laws.reproduction import write_program


class OwnPrecision:
    """The module before it was converted to fp64.

    fp64 shows faults that rounding would hide. But a module may also be wrong in fp64 alone, for
    example because it adds the least number of fp64 to scores that it casts to fp32.
    """

    def __init__(self, module: nn.Module, probes: Probes, roundings: int, inside: torch.dtype):
        self._converted, self._probes, self._roundings = module, probes, roundings
        self._inside = lower_precision(inside, probes.own)

    @cached_property
    def _module(self) -> nn.Module:
        return copy_module(self._converted).to(self._probes.own)

    def refutes(self, trial: Trial, x: Tensor, error: float) -> bool:
        """Whether the module's own precision is fine enough to show an error, and does not."""
        own, allowed = self._measure(trial, x)
        return own <= allowed and (not math.isfinite(error) or allowed < error)

    def describe(self, trial: Trial, x: Tensor, error: float) -> str:
        """Name the precision of an error, and say how large it is in the module's own."""
        name = name_precision(self._probes.dtype)
        if self._probes.own == self._probes.dtype:
            return name
        own, allowed = self._measure(trial, x)
        if math.isnan(allowed) or own <= allowed >= error:
            return name
        alone = " alone" if own <= allowed else ""
        return f"{name}{alone}, {own:.2g} in {name_precision(self._probes.own)}"

    def _measure(self, trial: Trial, x: Tensor) -> tuple[float, float]:
        """Return the error in the module's own precision and its bound; NaN if it cannot be run."""
        if self._probes.own == self._probes.dtype:
            return math.nan, math.nan
        try:
            inputs = x.to(self._probes.own)
            allowed = self._roundings * noise_floor(self._module, inputs, self._inside)
            difference, reference = trial.check(self._module, inputs, **trial.given)
        except Exception:
            return math.nan, math.nan
        return relative_error(difference.detach(), reference.detach()), allowed


ROUNDINGS = 64
NOISY = 1e-2
MOST_LENGTHS = 64
MOST_NOISY = 3
"""Lengths with too much noise at which outputs that are not finite are still looked for."""


@dataclass
class Undecided:
    """Lengths that were not compared.

    Attributes:
        noisy: lengths at which the noise floor is too high, each with its reason.
        late: lengths that there was no time for.
    """

    noisy: dict[int, str] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        words = [f"length {length}: {why}" for length, why in list(self.noisy.items())[:1]]
        more = len(self.noisy) - 1
        if more > 0:
            words.append(f"the same at {more} more {'length' if more == 1 else 'lengths'}")
        if self.late:
            words.append(f"no time was left for lengths {', '.join(map(str, self.late))}")
        return "; ".join(words)


@dataclass(frozen=True)
class _Result:
    """A trial on an input, with its error and where that is largest."""

    trial: Trial
    x: Tensor
    error: float
    allowed: float
    row: int
    position: int
    finite: bool

    @property
    def words(self) -> str:
        words = self.trial.words.format(row=self.row, position=self.position)
        return f"length {self.x.shape[1]}: {words}"

    @property
    def fails(self) -> bool:
        return not self.error <= self.allowed


def run_trials(
    law: str,
    module: nn.Module,
    probes: Probes,
    trials: Trials,
    roundings: int = ROUNDINGS,
    inside: torch.dtype | None = None,
    longer: Trials | None = None,
) -> Verdict:
    """Run trials on every probe, shortest first, and compare errors with the noise floor.

    Args:
        law: its name.
        module: as it is.
        probes: what it is tried on.
        trials: gives the trials on one input.
        roundings: how many times the noise floor an error may be.
        inside: the precision inside the module that matters to the trials; None for the lowest.
        longer: gives fewer trials, for the probes' longer lengths, while there is time.
    """
    inside = inside or probes.inside
    floor = partial(noise_floor, inside=inside)
    began, worst, allowed, note = read_clock(), 0.0, 0.0, ""
    own = OwnPrecision(module, probes, roundings, inside)
    tried: list[int] = []
    undecided = Undecided()
    further = () if longer is None else probes.longer
    timer = Timer(probes.settings.seconds)
    for length in (*probes.lengths, *further):
        extra = length not in probes.lengths
        if extra:
            trials = longer or trials
            if not timer.allows(length):
                break
        elif len(tried) >= LEAST and read_clock() - began > probes.settings.seconds:
            undecided.late = [late for late in probes.lengths if late >= length]
            break
        x = probes.input(length)
        try:
            memoized = Memoized(module, x)
        except Exception:
            if extra:  # e.g. longer than a table of positions, or of an odd length
                continue
            raise
        bound = roundings * floor(memoized, x)
        # Above NOISY the bound could hide a fault, e.g. a leak or a dependence on summation order.
        if not (repeats := memoized.repeats()) or not bound < NOISY:
            if not extra:
                undecided.noisy[length] = _explain_noise(module, x, bound / roundings)
            if repeats and math.isfinite(bound) and len(undecided.noisy) <= MOST_NOISY:
                results = _run_each(trials, module, memoized, x, bound)
                lost = _find_first(results, own, lambda result: not result.finite)
                if lost is not None:
                    return _report_failure(law, lost, probes, own)
            continue
        refusal = None
        for result in _run_each(trials, module, memoized, x, bound):
            allowed = max(allowed, bound)
            if isinstance(result, Exception):
                refusal = refusal or result
            elif not result.fails:
                worst = max(worst, result.error)
            elif own.refutes(result.trial, x, result.error):
                note = note or f"{result.words}, in {own.describe(result.trial, x, result.error)}"
            else:
                rerun = partial(_rerun, module, own=own, roundings=roundings, floor=floor)
                smallest = _shrink(probes, result, max(tried, default=0), trials, rerun)
                return _report_failure(law, smallest, probes, own)
        if refusal is not None:
            if not extra:
                undecided.noisy[length] = describe_refusal(refusal)
            continue
        tried.append(length)
    # One token alone shows nothing of what moves between tokens.
    if max(tried, default=0) < min(2, max(probes.lengths)):
        return Verdict(law, "not decided", str(undecided), allowed=NOISY)
    lengths = f"lengths {', '.join(map(str, sorted(tried)))} in {name_precision(probes.dtype)}"
    evidence = f"largest relative error {worst:.2g} ({allowed:.2g} allowed), {lengths}"
    evidence += f"; not decided: {undecided}" if str(undecided) else ""
    return Verdict(
        law,
        "holds",
        evidence,
        measured=worst,
        allowed=allowed,
        left=str(undecided),
        note=note,
        tokens=max(tried),
    )


def _explain_noise(module: nn.Module, x: Tensor, floor: float) -> str:
    """Explain why nothing can be compared on an input."""
    with torch.no_grad():
        first, second = module(x), module(x)
    if not first.isfinite().all():
        row, position = locate_largest(torch.where(first.isfinite(), 0.0, 1.0))
        return f"output {position} of row {row} is not finite"
    if not torch.equal(first, second):
        return f"a second call moves the output by {relative_error(second - first, first):.2g}"
    return f"rounding the input moves the output by {floor:.2g}"


class Memoized(nn.Module):
    """A module that remembers its output for one input, because every check computes it first."""

    def __init__(self, module: nn.Module, x: Tensor):
        super().__init__()
        self.module, self.x = module, x
        with torch.no_grad():
            self.y = module(x).clone()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output that is remembered, or the module's for another input.

        That a call overwrites an output, or reads strides wrongly, is for "deterministic" to judge.
        """
        if x is self.x and not torch.is_grad_enabled():
            return self.y
        return self.module(x.contiguous()).clone()

    @torch.no_grad()
    def repeats(self) -> bool:
        """Whether a second call gives the same output, except for rounding."""
        return (
            relative_error(self.module(self.x) - self.y, self.y) <= torch.finfo(torch.float32).eps
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return deepcopy(self.module, memo)


def _run_each(
    trials: Trials, module: nn.Module, memoized: nn.Module, x: Tensor, bound: float
) -> Iterator[_Result | Exception]:
    """Yield the result of each trial on an input, or what the module raised instead."""
    try:
        for trial in trials(module, x):
            try:
                yield _run(memoized, x, trial, bound)
            except Exception as error:
                yield error
    except Exception as error:  # what chooses trials calls the module, too
        yield error


def _run(module: nn.Module, x: Tensor, trial: Trial, allowed: float) -> _Result:
    try:
        difference, reference = trial.check(module, x, **trial.given)
    except Exception as error:
        if not trial.refusable or isinstance(error, IncomparableError):
            raise
        difference, reference = torch.zeros_like(x), x
    error = relative_error(difference.detach(), reference.detach())
    row, position = (0, 0) if error == 0 else locate_largest(difference)
    finite = bool(difference.isfinite().all())
    return _Result(trial, x, error, allowed, row, position, finite)


def _find_first(
    results: Iterable[_Result | Exception], own: OwnPrecision, wrong: Callable[[_Result], bool]
) -> _Result | None:
    """Return the first result that is wrong and not refuted by the module's own precision."""
    for result in results:
        if isinstance(result, Exception) or not wrong(result):
            continue
        if not own.refutes(result.trial, result.x, result.error):
            return result
    return None


def locate_largest(difference: Tensor) -> tuple[int, int]:
    """Return the row and the position at which a difference [b t …] is largest, or NaN."""
    sizes = (
        difference.detach().abs().flatten(2).amax(2) if difference.ndim > 2 else difference.abs()
    )
    worst = int(sizes.nan_to_num(math.inf).argmax())
    return worst // sizes.shape[1], worst % sizes.shape[1]


def _shrink(
    probes: Probes,
    failure: _Result,
    passed: int,
    trials: Trials,
    rerun: Callable[[Tensor, Trials], _Result | None],
) -> _Result:
    """Return a failure with the fewest rows, then with the fewest tokens above `passed`."""
    began, length, trial = read_clock(), failure.x.shape[1], failure.trial
    for rows in range(1, probes.settings.batch):
        fewer = rerun(probes.input(length, rows), lambda module, x: [trial])
        if fewer is not None:
            failure = fewer
            break
    rows = failure.x.shape[0]
    for shorter in range(passed + 1, min(length, passed + MOST_LENGTHS)):
        if read_clock() - began > probes.settings.seconds:
            break
        x = probes.input(shorter, rows)
        fewer = rerun(x, trials)
        if fewer is not None:
            return fewer
    return failure


def _rerun(
    module: nn.Module,
    x: Tensor,
    trials: Trials,
    own: OwnPrecision,
    roundings: int,
    floor: Callable[[nn.Module, Tensor], float],
) -> _Result | None:
    """Return the first trial that fails on an input; None if none does, or x is refused."""
    try:
        bound = roundings * floor(module, x)
    except Exception:
        return None
    if not bound < NOISY:
        return None
    results = _run_each(trials, module, module, x, bound)
    return _find_first(results, own, lambda result: result.fails)


def _report_failure(law: str, failure: _Result, probes: Probes, own: OwnPrecision) -> Verdict:
    shown = own.describe(failure.trial, failure.x, failure.error)
    evidence = f"relative error {failure.error:.2g} ({failure.allowed:.2g} allowed) in {shown}"
    check, given = failure.trial.check, failure.trial.given
    rows, length = failure.x.shape[:2]
    arguments = "".join(f", {name}={value!r}" for name, value in given.items())
    body = f"""
        {probes.print_input(rows, length)}
        difference, reference = {check.__name__}(module, x{arguments})
        error = relative_error(difference.detach(), reference.detach())
        print({f"{failure.words}: relative error"!r}, error, "of {failure.allowed:.2g} allowed")
        sys.exit(not error <= {failure.allowed!r})
    """
    words = f"{law}: {failure.words}"
    snippet = write_program(probes.origin, (draw, relative_error, check), body, words)
    where = {"length": length, "rows": rows, "row": failure.row, "position": failure.position}
    return Verdict(
        law,
        "fails",
        evidence,
        failure.words,
        failure.error,
        failure.allowed,
        snippet,
        {**where, **given},
    )


HALF_ALLOWED = 0.0625
"""Relative error in bf16 that roundings explain in calls of the same shape: eight units."""


def run_in_half(law: str, module: nn.Module, probes: Probes, trials: Trials) -> Verdict | None:
    """Return the failure of trials in bf16, of calls with inputs of the same shape; None if none.

    A module may take another way in bf16, e.g. another kernel. Only large errors count, since
    rounding moves outputs far in bf16.
    """
    length = max((n for n in probes.lengths if n <= HALF_LENGTH), default=probes.lengths[0])
    half = replace(
        probes,
        dtype=torch.bfloat16,
        own=torch.bfloat16,
        origin=replace(
            probes.origin, recipe=(*probes.origin.recipe, "module = module.to(torch.bfloat16)")
        ),
    )
    try:
        low, x = copy_module(module).to(torch.bfloat16), half.input(length)
        for trial in trials(low, x):
            result = _run(low, x, trial, HALF_ALLOWED)
            if result.fails and result.finite:
                return _report_failure(law, result, half, OwnPrecision(low, half, 1, half.inside))
    except Exception:  # it does not run in bf16, which "precision" says
        return None
    return None


HALF_LENGTH = 33
"""Longest input that is tried in bf16."""
