"""Whether a failure found in fp64 also occurs in the module's own precision."""

import math
from functools import cached_property

import torch
from torch import Tensor, nn

from lab.laws.copying import copy_module
from lab.laws.noise import lower_precision, noise_floor, relative_error
from lab.laws.probes import Probes, name_precision
from lab.laws.trial import Trial


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
